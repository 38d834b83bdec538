"""What a supervisor is told at its start, and the messages on its control socket.

The control socket is a Unix stream socket pair; each message is one line of JSON. The supervisor
destroys the sandbox when the other end closes or the manager's process ends.

Supervisor to manager: `Launched`, `Failed`, `Ended`, `Closed`, `Notice` (tagged by `type`).
Manager to supervisor: `Command`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..ledger.events import Event, UsageRecord
from ..limits.base import ControlState
from ..manifest.plan import Plan
from ..sandbox.base import Environment


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the relay: ipc prefix (socket names are `<prefix>-<port>`), ports and key."""

    prefix: str
    shell: int = 1
    iopub: int = 2
    stdin: int = 3
    control: int = 4
    hb: int = 5
    key: str


class LaunchSpec(msgspec.Struct, kw_only=True):
    """Everything a supervisor needs.

    Attributes:
        kernel_id: names the kernel in ledger and messages.
        mode: `kernel` has a relay; `command` runs argv with the descriptors given.
        plan, environment, argv, env: see sandbox.base.Request.
        outer: the manager's side of the relay (mode `kernel`).
        manager_pid: the process whose end ends the sandbox.
        runtime_dir: this kernel's private folder on the host; the supervisor removes it.
        ledger: path of the ledger's database.
        stdio: descriptors (stdin, stdout, stderr) inherited by the supervisor for mode `command`.
        terminal: see sandbox.base.Request.
        export_dir: where promoted outputs go; None: the notebook's folder + outputs.path.
        promote: promote verified outputs at the end.
    """

    kernel_id: str
    mode: Literal["kernel", "command"] = "kernel"
    plan: Plan
    environment: Environment
    argv: tuple[str, ...]
    env: dict[str, str]
    outer: Ports | None = None
    manager_pid: int
    runtime_dir: str
    ledger: str
    stdio: tuple[int, int, int] | None = None
    terminal: bool = False
    export_dir: str | None = None
    promote: bool = True


class Launched(msgspec.Struct, tag="launched", kw_only=True):
    """The command has been executed inside. `posture` was measured, `startup` is seconds per step."""

    pid: int
    isolation: str
    posture: dict[str, ControlState]
    startup: dict[str, float]


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """Nothing runs, nothing is left. `kind`: not-found, permission, refused, cannot-isolate, error."""

    kind: str
    stage: str
    message: str
    remedy: str = ""


class Ended(msgspec.Struct, tag="ended", kw_only=True):
    """The command has ended; destruction follows. `budget` names the budget that ended it, if one did."""

    status: int
    budget: str | None = None
    message: str = ""


class Closed(msgspec.Struct, tag="closed", kw_only=True):
    """Destruction is over and recorded; `artifacts` as in the `run` result. The supervisor exits next."""

    record: UsageRecord
    artifacts: list[dict[str, object]] = []


class Notice(msgspec.Struct, tag="notice", kw_only=True):
    """An event, as soon as the ledger has it."""

    event: Event


class Command(msgspec.Struct, kw_only=True):
    """`do`: signal (number in `signum`), destroy (`reason` becomes closed_by), expect (the command will
    end by itself, for this `reason`), promote (verify and promote now)."""

    do: Literal["signal", "destroy", "expect", "promote"]
    signum: int = 0
    reason: str = "shutdown"


FromSupervisor = Launched | Failed | Ended | Closed | Notice

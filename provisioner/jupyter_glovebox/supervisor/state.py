"""What a running supervisor says about itself on disk: for `ps`, and for sweeping up after a dead one.

One file, `state.json`, in the kernel's private runtime folder, replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from ..ledger.events import Usage
from ..limits.base import ControlState

STATE_FILE = "state.json"


class KernelState(msgspec.Struct, kw_only=True):
    """One running kernel. `supervisor_start` is the start time in clock ticks (proc_pid_stat(5), field 22).

    Attributes:
        limiter: name under which the limits were made, for sweeping.
        started: Unix time in seconds.
        folder: the runtime folder (set when read).
    """

    kernel_id: str
    notebook: str | None
    user: str
    isolation: str
    plan: str
    ledger: str
    started: float
    supervisor_pid: int
    supervisor_start: int
    limiter: str
    posture: dict[str, ControlState] = {}
    usage: Usage = Usage()
    blocked: int = 0
    folder: str = ""


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets: fields count from the last bracket.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def write_state(state: KernelState, folder: str) -> None:
    """Replace the state file of `folder`. Raises OSError."""
    temporary = f"{folder}/{STATE_FILE}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(state))
    os.replace(temporary, f"{folder}/{STATE_FILE}")


def read_states(runtime: Path) -> list[KernelState]:
    """Every kernel that has a runtime folder, dead supervisors included, oldest first."""
    states: list[KernelState] = []
    for folder in sorted(runtime.iterdir()) if runtime.is_dir() else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=KernelState)
            state.folder = str(folder)
            states.append(state)
    return sorted(states, key=lambda state: state.started)


def alive(state: KernelState) -> bool:
    """Whether the supervisor that wrote this state still runs."""
    return process_start(state.supervisor_pid) == state.supervisor_start

"""The one interface behind which cgroup v2, cgroup v1 and rlimits stand.

A `Limiter` belongs to one kernel. The supervisor makes it before the sandbox, the sandbox's first
process enters it before exec, and the supervisor reads and finally destroys it.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from ..ledger.events import CleanupStep

State = Literal["enforced", "soft", "off"]


class ControlState(msgspec.Struct, frozen=True):
    """One control of the posture. `fix` says what would make it `enforced`; empty when it is."""

    state: State
    reason: str
    fix: str = ""


class LimitValues(msgspec.Struct, frozen=True, kw_only=True):
    """What a limiter is asked to hold, taken from a plan's budgets.

    Attributes:
        memory: bytes, tmpfs sizes included (what the hard limit is set to).
        memory_budget: bytes the plan names, for messages.
        cpus: cores, may be fractional.
        cpu_time, wall_time: seconds of the kernel's whole life.
        processes: tasks (threads count, as pids.max does).
        open_files: per process (RLIMIT_NOFILE).
    """

    memory: int
    memory_budget: int
    cpus: float
    cpu_time: float
    wall_time: float
    processes: int
    open_files: int


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A usage reading. None where this limiter cannot measure it. Bytes, seconds, counts.

    Attributes:
        memory_limit_hits: how often use met the hard limit; 0 beside an OOM kill means that the machine,
            not the budget, ran out. None where the kernel does not count it.
    """

    memory: int | None = None
    memory_peak: int | None = None
    cpu_seconds: float | None = None
    tasks: int | None = None
    tasks_peak: int | None = None
    oom_kills: int = 0
    pids_refused: int = 0
    memory_limit_hits: int | None = None


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that has ended, or (fatal False) refused something to, a kernel.

    Attributes:
        budget: `memory`, `cpu_time`, `wall_time`, `processes`.
        message: one sentence with limit and use, for a person.
        fatal: the kernel must end (False: e.g. a fork was refused, the kernel lives on).
    """

    budget: Literal["memory", "cpu_time", "wall_time", "processes", "storage", "display"]
    message: str
    fatal: bool


class Limiter(Protocol):
    """One kernel's limits."""

    kind: str
    """`cgroup-v2-delegated`, `cgroup-v2-systemd`, `cgroup-v1`, `rlimit`."""

    def states(self) -> dict[str, ControlState]:
        """For memory, cpus, cpu_time, processes, wall_time, open_files: how each is held."""
        ...

    def enter(self) -> None:
        """Called in the forked child before it execs bwrap: puts itself under the limits.

        Must only use descriptors opened beforehand and async-signal-safe work; raises OSError.
        """
        ...

    def adopt(self, init_pid: int) -> None:
        """Told once: pid 1 of the sandbox, as the host sees it. Checks that it is under these limits.

        Raises:
            CannotIsolateError: it is not.
        """
        ...

    def reading(self) -> Reading:
        """Current use; never raises for a limiter that exists."""
        ...

    def check(self) -> Breach | None:
        """The first budget that has ended since the last call, or None. Cheap: called every 100 ms."""
        ...

    def pids(self) -> list[int]:
        """Every process under these limits, as host pids."""
        ...

    def kill(self) -> None:
        """SIGKILL every process under these limits, also ones that fork meanwhile."""
        ...

    def destroy(self, timeout: float = 5.0) -> CleanupStep:
        """Kill, see it empty, remove it, see it gone. Idempotent. Never raises."""
        ...

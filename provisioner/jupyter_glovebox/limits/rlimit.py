"""The limiter without control groups: polling through /proc, always shown as `soft`.

No RLIMIT_NPROC: it counts all processes of the user, so that kernels would eat each other's budget. No
RLIMIT_AS or RLIMIT_DATA: numerical libraries reserve far more than they use. Members are found below
pid 1 of the sandbox's pid namespace, and its end is theirs (pid_namespaces(7)).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from ..errors import CannotIsolateError
from ..ledger.events import CleanupStep
from .base import Breach, ControlState, LimitValues, Reading
from .budgets import BudgetWatch
from .cgroup import fixed_states, keep_peaks
from .entry import Entry
from .host import Host
from .members import descendants, measure, namespace_members, namespace_of, proportional_memory


class RlimitLimiter:
    """Polled limits. Between two polls a kernel can use more than its budget.

    Args:
        reasons: why nothing better could be had.
        fix: what would bring it.
    """

    kind = "rlimit"

    def __init__(
        self, values: LimitValues, cpus: frozenset[int], host: Host, *, reasons: tuple[str, ...], fix: str
    ) -> None:
        self._values = values
        self._host = host
        self._entry = Entry([], cpus, values.open_files)
        self._watch = BudgetWatch(values, frozenset())
        why = "polled: " + "; ".join(reasons)
        self._states = {
            name: ControlState("soft", why, fix) for name in ("memory", "cpu_time", "processes")
        } | {"cpus": ControlState("soft", "affinity, which a process may change: " + "; ".join(reasons), fix)}
        self._states |= fixed_states(self._entry.open_files)
        self._init_pid = self._init_fd = -1
        self._namespace: int | None = None
        self._last = Reading()

    def states(self) -> dict[str, ControlState]:
        return dict(self._states)

    def enter(self) -> None:
        self._entry()

    def adopt(self, init_pid: int) -> None:
        try:
            fd = os.pidfd_open(init_pid)
        except OSError as error:
            raise CannotIsolateError(
                f"The sandbox ended before it was under its limits ({error.strerror})."
            ) from error
        namespace = namespace_of(init_pid, self._host.proc)
        if namespace is None or namespace == namespace_of(os.getpid(), self._host.proc):
            # Not kept: whatever this process is, it is not ours to end.
            os.close(fd)
            raise CannotIsolateError(f"Process {init_pid} is not in a pid namespace of its own.")
        self._init_pid, self._init_fd, self._namespace = init_pid, fd, namespace

    def reading(self) -> Reading:
        if self._init_fd < 0 or self._ended():
            return self._last
        proc = self._host.proc
        members = descendants(self._init_pid, proc)
        if members is None:
            members = self.pids()
        sums = measure(members, proc)
        memory = sums.resident
        if memory > self._values.memory_budget:
            memory = min(memory, proportional_memory(members, proc) or memory)
        now = Reading(memory=memory, cpu_seconds=sums.cpu_seconds, tasks=sums.tasks)
        self._last = keep_peaks(now, self._last)
        return self._last

    def _ended(self) -> bool:
        return bool(select.select([self._init_fd], [], [], 0)[0])

    def check(self) -> Breach | None:
        return self._watch.check(self.reading())

    def pids(self) -> list[int]:
        # The inode of a namespace that has gone may be another's by now.
        if self._namespace is None or self._init_fd < 0 or self._ended():
            return []
        return namespace_members(self._namespace, self._host.proc)

    def kill(self) -> None:
        if self._init_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)

    def destroy(self, timeout: float = 5.0) -> CleanupStep:
        if self._init_fd < 0:
            return CleanupStep(verified=True, detail="no group was made, and no process is left")
        try:
            self.kill()
            if not select.select([self._init_fd], [], [], timeout)[0]:
                return CleanupStep(
                    verified=False, detail=f"pid 1 of the sandbox ({self._init_pid}) does not end"
                )
        except OSError as error:
            return CleanupStep(verified=False, detail=f"killing failed: {error.strerror}")
        os.close(self._init_fd)
        self._init_fd = -1
        return CleanupStep(verified=True, detail="pid 1 of the sandbox has ended, and with it every member")

"""The limiter that stands on control groups, of either version."""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from ..errors import CannotIsolateError
from ..ledger.events import CleanupStep
from .base import Breach, ControlState, LimitValues, Reading
from .budgets import BudgetWatch, size
from .entry import Entry
from .groups import Groups, destroy_groups
from .host import Host, swap_is_on
from .members import measure, proportional_memory


class CgroupLimiter:
    """One kernel in its groups. What a missing controller cannot hold is polled, and shown as `soft`.

    Args:
        kind: see `Limiter.kind`.
        groups: the groups, made and limited.
        controllers: those that are in force.
        swap_held: swap is limited to nothing.
        fix: what would bring the controllers that are missing.

    Raises:
        OSError: a group cannot be entered; the groups are the caller's to remove.
    """

    def __init__(
        self,
        kind: str,
        groups: Groups,
        controllers: frozenset[str],
        *,
        swap_held: bool,
        fix: str,
        host: Host,
        values: LimitValues,
        cpus: frozenset[int],
    ) -> None:
        self.kind = kind
        self.groups = groups
        self._controllers = controllers
        self._host = host
        self._values = values
        fds: list[int] = []
        try:
            for path in groups.paths():
                fds.append(os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        self._entry = Entry(fds, cpus, values.open_files)
        # Version 2 counts processor time in every group, version 1 by the controller cpuacct.
        self._counts_cpu = groups.read().cpu_seconds is not None
        self._states = self._describe(cpus, swap_held, fix)
        held = {"memory": "memory", "pids": "processes"}
        self._watch = BudgetWatch(values, frozenset(held[name] for name in controllers if name in held))
        self._last = Reading()
        self._killed = False
        self._destroyed: CleanupStep | None = None

    def _describe(self, cpus: frozenset[int], swap_held: bool, fix: str) -> dict[str, ControlState]:
        have, values = self._controllers, self._values
        version = "2" if self.kind.startswith("cgroup-v2") else "1"
        by = f"cgroup v{version}"
        polled = f"polled: the {by} controller %s is not passed on to our group"
        states: dict[str, ControlState] = {}
        if "memory" not in have:
            states["memory"] = ControlState("soft", polled % "memory", fix)
        elif not swap_held and swap_is_on(self._host.proc):
            states["memory"] = ControlState(
                "soft",
                f"{by} holds {size(values.memory)} of memory, but not how much is swapped out",
                "Boot with swapaccount=1, or switch swap off: sudo swapoff -a",
            )
        else:
            states["memory"] = ControlState("enforced", f"{by}: {size(values.memory)}, no swap")
        if "cpu" in have:
            states["cpus"] = ControlState("enforced", f"{by}: a quota of {values.cpus:g} processors")
        elif "cpuset" in have:
            states["cpus"] = ControlState("enforced", f"{by}: processors {_list(cpus)}, no quota")
        else:
            states["cpus"] = ControlState(
                "soft", f"affinity to processors {_list(cpus)}, which a process may change", fix
            )
        states["cpu_time"] = (
            ControlState("enforced", f"{by} counts, the supervisor ends the kernel")
            if self._counts_cpu
            else ControlState("soft", polled % "cpuacct", fix)
        )
        states["processes"] = (
            ControlState("enforced", f"{by}: {values.processes} processes and threads")
            if "pids" in have
            else ControlState("soft", polled % "pids", fix)
        )
        return states | fixed_states(self._entry.open_files)

    def states(self) -> dict[str, ControlState]:
        return dict(self._states)

    def enter(self) -> None:
        self._entry()

    def adopt(self, init_pid: int) -> None:
        for path in self.groups.paths():
            try:
                inside = str(init_pid) in (path / "cgroup.procs").read_text().split()
            except OSError:
                inside = False
            if not inside:
                raise CannotIsolateError(
                    f"The sandbox is not under its limits: process {init_pid} is not in {path}.",
                    "Another program moves processes between control groups; stop it, and start again.",
                )

    def reading(self) -> Reading:
        if self._destroyed is not None and self._destroyed.verified:
            return self._last
        now = self.groups.read()
        if not {"memory", "pids"} <= self._controllers or now.cpu_seconds is None:
            now = self._polled(now)
        self._last = keep_peaks(now, self._last)
        return self._last

    def _polled(self, now: Reading) -> Reading:
        pids = self.groups.procs()
        sums = measure(pids, self._host.proc)
        memory, tasks, cpu = now.memory, now.tasks, now.cpu_seconds
        if "memory" not in self._controllers:
            memory = sums.resident
            if memory > self._values.memory_budget:
                memory = min(memory, proportional_memory(pids, self._host.proc) or memory)
        if "pids" not in self._controllers:
            tasks = sums.tasks
        if cpu is None:
            cpu = sums.cpu_seconds
        return msgspec.structs.replace(now, memory=memory, tasks=tasks, cpu_seconds=cpu)

    def check(self) -> Breach | None:
        if self._destroyed is not None:
            return None
        reading = self.reading()
        if self._killed:
            # Killing forbids new processes: refusals are ours from then on.
            reading = msgspec.structs.replace(reading, pids_refused=0)
        return self._watch.check(reading)

    def pids(self) -> list[int]:
        return self.groups.procs()

    def kill(self) -> None:
        self._killed = True
        self.groups.kill()

    def destroy(self, timeout: float = 5.0) -> CleanupStep:
        if self._destroyed is not None and self._destroyed.verified:
            return self._destroyed
        self._killed = True
        self.reading()
        self._entry.close()
        self._destroyed = destroy_groups(self.groups, timeout)
        return self._destroyed


_N = TypeVar("_N", int, float)


def _most(*values: _N | None) -> _N | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def keep_peaks(now: Reading, before: Reading) -> Reading:
    """Peaks that this kernel does not keep, and counters that a vanished file would reset."""
    return msgspec.structs.replace(
        now,
        memory_peak=_most(now.memory_peak, now.memory, before.memory_peak),
        cpu_seconds=_most(now.cpu_seconds, before.cpu_seconds),
        tasks_peak=_most(now.tasks_peak, now.tasks, before.tasks_peak),
        oom_kills=max(now.oom_kills, before.oom_kills),
        pids_refused=max(now.pids_refused, before.pids_refused),
        memory_limit_hits=_most(now.memory_limit_hits, before.memory_limit_hits),
    )


def fixed_states(open_files: int) -> dict[str, ControlState]:
    """Controls that need no control group."""
    return {
        "wall_time": ControlState("enforced", "the supervisor's clock"),
        "open_files": ControlState("enforced", f"RLIMIT_NOFILE {open_files} for each process"),
    }


def _list(cpus: frozenset[int]) -> str:
    return ",".join(map(str, sorted(cpus)))

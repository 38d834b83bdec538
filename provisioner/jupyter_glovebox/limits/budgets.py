"""Deciding from readings which budget has ended, and saying so in one sentence."""

from __future__ import annotations

import time
from typing import Literal

from .base import Breach, LimitValues, Reading

_REFUSAL_SECONDS = 5.0
"""At most one message about refused forks in this time: a fork bomb is refused thousands of times a second."""

_ALLOCATION = 4 << 20
"""The largest single charge (a huge page, and what is batched per processor): use stays that far below a limit."""


def size(count: int) -> str:
    """Bytes for a person, in powers of 1024."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


class BudgetWatch:
    """Turns readings into breaches: each fatal budget once, refused forks once per growth.

    Args:
        values: the limits.
        held: `memory` and `processes` when the operating system itself holds them; the others are
            compared with the readings here.
    """

    def __init__(self, values: LimitValues, held: frozenset[str]) -> None:
        self._values = values
        self._held = held
        self._said: set[str] = set()
        self._started = time.monotonic()
        self._refused = 0
        self._next_refusal = 0.0

    def check(self, reading: Reading) -> Breach | None:
        """The first budget that has ended since the last call."""
        return (
            self._once("memory", self._memory(reading))
            or self._once("cpu_time", self._cpu_time(reading))
            or self._once("wall_time", self._wall_time())
            or self._processes(reading)
        )

    def _once(
        self, budget: Literal["memory", "cpu_time", "wall_time", "processes"], message: str | None
    ) -> Breach | None:
        if message is None or budget in self._said:
            return None
        self._said.add(budget)
        return Breach(budget=budget, message=message, fatal=True)

    def _memory(self, reading: Reading) -> str | None:
        budget = self._values.memory_budget
        if "memory" in self._held:
            if not reading.oom_kills:
                return None
            used = size(reading.memory_peak or reading.memory or 0)
            if self._below_the_limit(reading):
                return (
                    f"the machine ran out of memory and its system killed the kernel, which used {used} "
                    f"of its memory budget of {size(budget)}"
                )
            files = self._values.memory - budget
            beside = f" (and {size(files)} for files in memory)" if files > 0 else ""
            return f"memory budget of {size(budget)}{beside} reached: the kernel used {used}"
        if reading.memory is None or reading.memory <= budget:
            return None
        return f"memory budget of {size(budget)} reached: the kernel used {size(reading.memory)}"

    def _below_the_limit(self, reading: Reading) -> bool:
        """Whether a process was killed for want of memory though its kernel had not used up its own."""
        if reading.memory_limit_hits is not None:
            return reading.memory_limit_hits == 0
        # Version 1 does not count (memory.failcnt stays 0 on newer kernels): compare the peak.
        peak = reading.memory_peak
        return peak is not None and peak + _ALLOCATION < self._values.memory

    def _cpu_time(self, reading: Reading) -> str | None:
        limit, used = self._values.cpu_time, reading.cpu_seconds
        if used is None or used < limit:
            return None
        return f"cpu_time budget of {duration(limit)} reached: the kernel used {duration(used)} of processor time"

    def _wall_time(self) -> str | None:
        limit, used = self._values.wall_time, time.monotonic() - self._started
        if used < limit:
            return None
        return f"wall_time budget of {duration(limit)} reached: the kernel ran for {duration(used)}"

    def _processes(self, reading: Reading) -> Breach | None:
        limit = self._values.processes
        if "processes" not in self._held:
            if reading.tasks is None or reading.tasks <= limit:
                return None
            return self._once(
                "processes",
                f"processes budget of {limit} reached: the kernel had {reading.tasks} processes and threads",
            )
        now = time.monotonic()
        if reading.pids_refused <= self._refused or now < self._next_refusal:
            return None
        times = reading.pids_refused - self._refused
        self._refused = reading.pids_refused
        self._next_refusal = now + _REFUSAL_SECONDS
        return Breach(
            budget="processes",
            message=f"processes budget of {limit} reached: a new process or thread was refused "
            f"{times} time{'s' if times > 1 else ''}",
            fatal=False,
        )

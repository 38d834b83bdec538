"""Which processors a kernel gets, and how budgets are worded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from jupyter_glovebox.limits.base import LimitValues, Reading
from jupyter_glovebox.limits.budgets import BudgetWatch, duration, size
from jupyter_glovebox.limits.entry import choose_cpus

VALUES = LimitValues(
    memory=1 << 30, memory_budget=1 << 30, cpus=1, cpu_time=60, wall_time=60, processes=8, open_files=64
)


def test_processors_are_spread_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    chosen = [choose_cpus(1.5, f"kernel-{n}") for n in range(50)]
    assert {len(cpus) for cpus in chosen} == {2}
    assert set().union(*chosen) == {2, 3, 5, 7}
    assert len(set(chosen)) == 4
    assert choose_cpus(1.5, "kernel-0") == chosen[0]
    assert choose_cpus(64, "x") == {2, 3, 5, 7}
    assert len(choose_cpus(0.1, "x")) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (300 << 20, "300.0 MiB"), (2 << 30, "2.0 GiB")]
)
def test_sizes(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.4, "0.4 s"), (119, "119.0 s"), (1800, "30.0 min"), (7200, "2.0 h")]
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


def test_refusals_are_told_once_per_growth_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = BudgetWatch(VALUES, frozenset({"memory", "processes"}))
    first = watch.check(Reading(pids_refused=3))
    assert first is not None
    assert (first.fatal, first.message.endswith("refused 3 times")) == (False, True)
    assert watch.check(Reading(pids_refused=3)) is None
    assert watch.check(Reading(pids_refused=500)) is None
    now[0] += 5
    later = watch.check(Reading(pids_refused=500))
    assert later is not None
    assert later.message.endswith("refused 497 times")
    now[0] += 5
    assert watch.check(Reading(pids_refused=500)) is None


def test_each_fatal_budget_is_told_once_and_memory_first() -> None:
    watch = BudgetWatch(VALUES, frozenset({"memory", "processes"}))
    reading = Reading(memory_peak=1 << 30, cpu_seconds=61, oom_kills=1)
    told = [watch.check(reading) for _ in range(3)]
    assert [breach.budget if breach else None for breach in told] == ["memory", "cpu_time", None]


def test_the_supervisor_side_imports_nothing_heavy() -> None:
    code = "import sys; from jupyter_glovebox.limits import choosing; print(*sys.modules)"
    loaded = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.decode().split()
    )
    before = (
        subprocess.run(
            [sys.executable, "-c", "import sys, msgspec, pathlib, subprocess; print(*sys.modules)"],
            capture_output=True,
            check=True,
        )
        .stdout.decode()
        .split()
    )
    assert not {"asyncio", "inspect", "email", "http", "yaml", "zmq"} & (set(loaded) - set(before))

"""Polled limits, with real pid namespaces made by bwrap; the same as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox import limits
from jupyter_glovebox.errors import CannotIsolateError, UsageError
from jupyter_glovebox.limits.base import Breach, LimitValues
from jupyter_glovebox.limits.rlimit import RlimitLimiter

MIB = 1 << 20


def values(**changes: Any) -> LimitValues:
    given: dict[str, Any] = {
        "memory": 64 * MIB, "memory_budget": 64 * MIB, "cpus": 1.0, "cpu_time": 60.0, "wall_time": 60.0,
        "processes": 32, "open_files": 128,
    }  # fmt: skip
    return LimitValues(**(given | changes))


class Boxed:
    """Python code in a pid namespace of its own, under polled limits."""

    def __init__(self, root: Path, code: str, **changes: Any) -> None:
        limiter = limits.choose(values(**changes), "soft", root=root)
        assert isinstance(limiter, RlimitLimiter)
        self.limiter = limiter
        info, told = os.pipe()
        self.process = subprocess.Popen(
            ["/usr/bin/bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc",
             "--dev", "/dev", "--info-fd", str(told), "--", sys.executable, "-I", "-S", "-c", code],
            preexec_fn=limiter.enter, pass_fds=[told], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(told)
        with os.fdopen(info) as file:
            self.init = int(json.load(file)["child-pid"])
        limiter.adopt(self.init)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def breach(self, seconds: float = 10) -> Breach:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.limiter.check():
                return found
            time.sleep(0.02)
        raise AssertionError(f"no budget ended: {self.limiter.reading()}")

    def end(self) -> None:
        step = self.limiter.destroy()
        assert step.verified, step.detail
        self.process.wait(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Any]:
    boxes: list[Boxed] = []

    def make(code: str, **changes: Any) -> Boxed:
        boxes.append(Boxed(tmp_path, code, **changes))
        return boxes[-1]

    yield make
    for boxed in boxes:
        boxed.end()


def test_memory(box: Any) -> None:
    boxed = box("x = bytearray(100 << 20); print('full', flush=True); import time; time.sleep(60)")
    assert boxed.line() == "full", "the control: nothing refuses the memory at once"
    breach = boxed.breach()
    assert (breach.budget, breach.fatal) == ("memory", True)
    assert breach.message.startswith("memory budget of 64.0 MiB reached: the kernel used 1")
    assert boxed.limiter.reading().memory_peak > 100 * MIB


def test_shared_pages_count_once(box: Any) -> None:
    """Eight forks of one 40 MiB process hold 320 MiB by resident size, and hardly more than 40 in fact."""
    boxed = box(
        "import os, time, mmap\nx = mmap.mmap(-1, 40 << 20); x.write(b'x' * (40 << 20))\n"
        "for _ in range(8):\n    if os.fork() == 0:\n        sum(x[::4096]); time.sleep(60); os._exit(0)\n"
        "time.sleep(0.5); print('ready', flush=True); time.sleep(60)",
        memory_budget=120 * MIB,
    )
    assert boxed.line() == "ready"
    resident = sum(
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in boxed.limiter.pids()
    )
    assert resident > 150 * MIB, "the control: resident sizes do exceed the budget"
    assert boxed.limiter.check() is None
    assert boxed.limiter.reading().memory < 120 * MIB


def test_processes(box: Any) -> None:
    boxed = box(
        "import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(60); os._exit(0)\ntime.sleep(60)"
    )
    breach = boxed.breach()
    assert (breach.budget, breach.fatal) == ("processes", True)
    assert breach.message.startswith("processes budget of 32 reached: the kernel had ")


def test_cpu_time_of_threads_and_waited_children(box: Any) -> None:
    boxed = box(
        "import os, time\nwhile True:\n    if os.fork() == 0:\n        e = time.process_time() + 0.05\n"
        "        while time.process_time() < e: pass\n        os._exit(0)\n    os.wait()",
        cpu_time=0.4,
    )
    assert boxed.breach().budget == "cpu_time"


def test_members_include_double_forks_and_all_of_them_end(box: Any) -> None:
    boxed = box(
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n        time.sleep(60); os._exit(0)\n    os.wait()\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    assert boxed.line() == "ready"
    members = boxed.limiter.pids()
    assert len(members) == 12  # pid 1 of bwrap, the command, ten orphans
    assert boxed.limiter.reading().tasks == 12
    assert os.getpid() not in members
    began = time.monotonic()
    boxed.limiter.kill()
    assert boxed.limiter.destroy().verified
    assert time.monotonic() - began < 1
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists() and _alive(pid)]
    assert boxed.limiter.pids() == []
    assert boxed.limiter.destroy().verified
    assert boxed.limiter.reading().tasks_peak == 12


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_states_are_soft_with_reason_and_fix(tmp_path: Path) -> None:
    limiter = limits.choose(values(), "soft", root=tmp_path)
    states = limiter.states()
    assert {name for name, state in states.items() if state.state == "soft"} == {
        "memory", "cpus", "cpu_time", "processes",
    }  # fmt: skip
    assert states["wall_time"].state == states["open_files"].state == "enforced"
    assert "cgroup v2 is not mounted" in states["memory"].reason
    refusal = limits.refuse_reason(limiter)
    assert refusal is not None
    assert "memory, cpus, cpu_time, processes" in refusal
    assert limiter.check() is None
    assert limiter.destroy().verified


def test_adopting_what_is_not_a_sandbox_is_refused(tmp_path: Path) -> None:
    limiter = limits.choose(values(), "soft", root=tmp_path)
    with subprocess.Popen(["sleep", "60"]) as outside:
        with pytest.raises(CannotIsolateError, match="pid namespace"):
            limiter.adopt(outside.pid)
        assert limiter.pids() == []
        limiter.kill()
        assert limiter.destroy().verified
        time.sleep(0.05)
        assert outside.poll() is None, "a process that is not ours was killed"
        outside.kill()
    with pytest.raises(CannotIsolateError):
        limiter.adopt(outside.pid)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-a", "a b", "a\n", "é", "x" * 101])
def test_names_that_no_group_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="control group"):
        limits.choose(values(), name, root=tmp_path)
    with pytest.raises(UsageError, match="control group"):
        limits.sweep(name, root=tmp_path)


@pytest.mark.parametrize(
    "change", [{"memory": 0}, {"cpus": float("inf")}, {"processes": -1}, {"cpu_time": 0}]
)
def test_limits_of_nothing_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="greater than nothing"):
        limits.choose(values(**change), "soft", root=tmp_path)

"""A sandbox ends as a whole, whoever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import box
from .conftest import ROOT

# The grandchild leaves its session and its parents, and sleeps under a name of its own.
ORPHAN = """
if [ "$1" = again ]; then exec sleep "$2"; fi
setsid sh -c 'sh -c "exec sleep $0" & exit 0' "$2"
echo started; exec sleep "$2"
"""


def _sleepers(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", mark.encode()]:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _until(condition: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


@pytest.fixture
def mark() -> str:
    """A number of seconds that nobody else sleeps for."""
    return f"{3000 + os.getpid() % 1000}.{time.monotonic_ns() % 1_000_000:06d}"


def test_orphans_outlive_their_parent_outside(mark: str) -> None:
    """The control: without a sandbox the double-forked sleeper survives the end of the command."""
    process = subprocess.Popen(
        ["sh", "-c", ORPHAN, "sh", "first", mark], stdout=subprocess.DEVNULL, start_new_session=True
    )
    _until(lambda: len(_sleepers(mark)) == 2, "both sleepers")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = _sleepers(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 1


@pytest.mark.parametrize("how", ["kill", "command-ends", "close"])
def test_orphans_end_with_the_sandbox(how: str, mark: str, tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", ORPHAN, "sh", "first", mark]
    with box.started(argv, box.make_plan(str(tmp_path))) as (sandbox, read):
        assert os.read(read, 99) == b"started\n"
        _until(lambda: len(_sleepers(mark)) == 2, "both sleepers")
        if how == "kill":
            sandbox.kill()
        elif how == "command-ends":
            sandbox.signal(signal.SIGTERM)
            _until(lambda: sandbox.poll() is not None, "the command's end")
            assert sandbox.poll() == -signal.SIGTERM
        else:
            sandbox.kill()
            sandbox.close()
            assert _sleepers(mark) == []
            return
        _until(lambda: not _sleepers(mark), "the end of the sleepers")


def test_supervisor_killed_takes_the_sandbox_with_it(mark: str, tmp_path: Path) -> None:
    program = (
        "from escape import box; import sys, os\n"
        "with box.started(['/bin/sh', '-c', sys.argv[1], 'sh', 'first', sys.argv[2]], "
        "box.make_plan(sys.argv[3])) as (_, read):\n"
        "    print(os.read(read, 99)); os.read(read, 1)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'provisioner'}:{ROOT / 'tests'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, ORPHAN, mark, str(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        _until(lambda: len(_sleepers(mark)) == 2, "both sleepers")
    finally:
        process.kill()
        process.wait()
    _until(lambda: not _sleepers(mark), "the end of the sleepers")


def test_many_descendants_end_at_once(mark: str, tmp_path: Path) -> None:
    script = f"for i in $(seq 200); do sleep {mark} & done; echo started; wait"
    with box.started(["/bin/sh", "-c", script], box.make_plan(str(tmp_path))) as (sandbox, read):
        assert os.read(read, 99) == b"started\n"
        _until(lambda: len(_sleepers(mark)) == 200, "the sleepers")
        sandbox.kill()
        _until(lambda: not _sleepers(mark), "their end")

"""What `doctor` says of limits: found by making them, for a process that does nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from .base import ControlState, Limiter, LimitValues

_CONTROLS = ("memory", "cpus", "cpu_time", "processes", "wall_time", "open_files")
_VALUES = LimitValues(
    memory=64 << 20, memory_budget=64 << 20, cpus=1, cpu_time=60, wall_time=60, processes=16, open_files=64
)


def probe() -> dict[str, ControlState]:
    """How memory, cpus, cpu_time, processes, wall_time and open_files would be held for a kernel started now.

    Limits are made, entered and destroyed, in a process of its own: the one that makes them may have to
    move to another group. When that fails, every control is `off` with the reason.
    """
    folders = [
        str(Path(module.__file__ or "").parents[1])
        for module in (sys.modules[__package__.split(".")[0]], msgspec)
    ]
    code = f"import sys; sys.path[:0] = {folders!r}\nfrom jupyter_glovebox.limits.trial import main; main()"
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _all_off(f"the trial did not end: {error}")
    if ended.returncode:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return _all_off(f"the trial failed: {said[-1] if said else f'status {ended.returncode}'}")
    return msgspec.json.decode(ended.stdout, type=dict[str, ControlState])


def _all_off(reason: str) -> dict[str, ControlState]:
    fix = "Report this with the output of: cat /proc/self/cgroup; ls -l /sys/fs/cgroup"
    return {name: ControlState("off", reason, fix) for name in _CONTROLS}


def main() -> None:
    """The trial's own process: prints the states as JSON. Raises what fails."""
    from .choosing import choose

    limiter = choose(_VALUES, f"trial-{os.getpid()}")
    try:
        if limiter.kind != "rlimit":
            _enter_and_adopt(limiter)
        states = limiter.states()
    finally:
        gone = limiter.destroy()
    if not gone.verified:
        raise RuntimeError(f"the limits could not be removed: {gone.detail}")
    sys.stdout.buffer.write(msgspec.json.encode(states))


def _enter_and_adopt(limiter: Limiter) -> None:
    entered, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            limiter.enter()
            os.write(told, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    try:
        if os.read(entered, 1) != b"1":
            raise RuntimeError("a process could not enter the limits")
        limiter.adopt(child)
    finally:
        os.close(entered)
        limiter.kill()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

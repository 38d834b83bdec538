"""The steps that destroy a sandbox. Each verifies itself and never raises."""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from ..ledger.events import CleanupStep
from ..limits.base import Limiter
from ..sandbox.base import Sandbox
from .folders import remove_tree
from .spec import Ports

if TYPE_CHECKING:
    from .relay import Relay

_PATIENCE = 5.0


def end_processes(sandbox: Sandbox | None, limiter: Limiter | None) -> CleanupStep:
    """Kill everything inside and see that pid 1 of the namespace and every member are gone."""
    if sandbox is None:
        return CleanupStep(verified=True, detail="no process was started")
    init = -1
    try:
        init = os.pidfd_open(sandbox.init_pid)
    except OSError:
        pass  # gone already: the kernel has emptied the namespace
    try:
        sandbox.kill()
        if limiter is not None:
            limiter.kill()
        if init >= 0 and not select.select([init], [], [], _PATIENCE)[0]:
            return CleanupStep(verified=False, detail=f"pid 1 of the sandbox ({sandbox.init_pid}) still runs")
    except OSError as error:
        return CleanupStep(verified=False, detail=f"killing failed: {error}")
    finally:
        if init >= 0:
            os.close(init)
    deadline = time.monotonic() + _PATIENCE
    while limiter is not None and (left := limiter.pids()):
        if time.monotonic() > deadline:
            return CleanupStep(verified=False, detail=f"processes left: {left[:10]}")
        time.sleep(0.002)
    sandbox.poll()
    return CleanupStep(verified=True, detail="pid 1 of the sandbox is gone, and no member is left")


def stop_relay(relay: Relay | None, outer: Ports | None) -> CleanupStep:
    """Close the manager's endpoints."""
    if relay is None or outer is None:
        return CleanupStep(verified=True, detail="no socket was opened")
    return relay.stop()


def remove_limits(limiter: Limiter | None) -> CleanupStep:
    """Remove the limits' groups."""
    if limiter is None:
        return CleanupStep(verified=True, detail="no limit was set up")
    return limiter.destroy()


def remove_folders(runtime: str, disk_scratch: str | None) -> CleanupStep:
    """Remove the runtime folder and a scratch on disk. A scratch in memory went with its last user."""
    left = [folder for folder in (runtime, disk_scratch) if folder and not remove_tree(folder)]
    if left:
        return CleanupStep(verified=False, detail=f"could not be removed: {', '.join(left)}")
    what = "runtime folder and scratch folder" if disk_scratch else "runtime folder; scratch was in memory"
    return CleanupStep(verified=True, detail=f"removed: {what}")

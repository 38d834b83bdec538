"""The control groups of one kernel, whatever their version, and how they are ended."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Protocol

from ..ledger.events import CleanupStep
from .base import Reading
from .files import remove_group


class Groups(Protocol):
    """The groups that hold one kernel."""

    def paths(self) -> list[Path]:
        """Every folder, in no order."""
        ...

    def procs(self) -> list[int]:
        """Every process in them, as pids of our namespace."""
        ...

    def kill(self) -> None:
        """SIGKILL every process in them, also ones forked meanwhile; does not wait. Raises OSError."""
        ...

    def empty(self) -> bool:
        """Whether no process is left."""
        ...

    def removed(self) -> None:
        """Told that the folders have been removed: removes what was made around them."""
        ...

    def read(self) -> Reading:
        """What the kernel has counted."""
        ...


def kill_pids(pids: list[int]) -> None:
    """SIGKILL each; those that have gone are no error. Raises PermissionError."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def destroy_groups(groups: Groups, timeout: float) -> CleanupStep:
    """Kill, see them empty, remove them, see them gone. Never raises."""
    deadline = time.monotonic() + timeout
    try:
        while not groups.empty():
            groups.kill()
            pause = min(time.monotonic() + 0.1, deadline)
            while not groups.empty() and time.monotonic() < pause:
                time.sleep(0.002)
            if time.monotonic() >= deadline and not groups.empty():
                left = groups.procs()
                return CleanupStep(
                    verified=False, detail=f"{len(left)} processes do not end, among them {left[:5]}"
                )
        for path in groups.paths():
            _remove(path, deadline)
        groups.removed()
    except OSError as error:
        return CleanupStep(verified=False, detail=f"{error.filename or 'a control group'}: {error.strerror}")
    left_over = [str(path) for path in groups.paths() if path.exists()]
    if left_over:
        return CleanupStep(verified=False, detail=f"still there: {', '.join(left_over)}")
    return CleanupStep(verified=True, detail=f"empty and removed: {', '.join(map(str, groups.paths()))}")


def _remove(path: Path, deadline: float) -> None:
    """Remove one group. The kernel takes a moment to let go of the last task, and says EBUSY until then."""
    while True:
        try:
            return remove_group(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                error.filename = str(path)
                raise
        time.sleep(0.002)

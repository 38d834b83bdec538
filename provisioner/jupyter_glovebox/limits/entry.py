"""What a forked child does to itself before it executes bwrap, whatever holds its limits."""

from __future__ import annotations

import math
import os
import resource
import zlib

_OOM_SCORE = b"500"


def choose_cpus(cpus: float, name: str) -> frozenset[int]:
    """The processors one kernel may use: as many as its cores rounded up, from a start that its name gives.

    The start differs between kernels, so that they do not all sit on the first processor.
    """
    available = sorted(os.sched_getaffinity(0))
    count = min(len(available), max(1, math.ceil(cpus)))
    start = zlib.crc32(name.encode()) % len(available)
    return frozenset(available[(start + i) % len(available)] for i in range(count))


class Entry:
    """Joins groups by descriptors opened beforehand. `close` is idempotent."""

    def __init__(self, procs_fds: list[int], cpus: frozenset[int], open_files: int) -> None:
        self._fds = procs_fds
        self._cpus = cpus
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # Without privilege a hard limit can only be lowered.
        self.open_files = open_files if hard == resource.RLIM_INFINITY else min(open_files, hard)

    def __call__(self) -> None:
        """Runs between fork and exec: system calls only. Raises OSError; the child must then exit."""
        for fd in self._fds:
            os.write(fd, b"0")  # cgroups(7): 0 stands for the writing process
        os.sched_setaffinity(0, self._cpus)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files, self.open_files))
        # When the machine itself runs out of memory, the sandbox goes first, not the Jupyter server.
        # Not possible where the process is not dumpable, or has a higher score already: no limit depends on it.
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(fd, _OOM_SCORE)
        except OSError:
            pass
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptors."""
        while self._fds:
            os.close(self._fds.pop())

"""Folders on the host that sandboxed code wrote: how much they hold, and how to remove them.

Whatever lies there is hostile: trees thousands of levels deep, folders without any rights, files that
were deleted and still are open. Nothing here recurses, follows a link, or holds more than a few
descriptors, and nothing raises for what it finds.

Sources: openat2(2), unlink(2), rename(2), statvfs(3), proc_pid_fd(5), proc_pid_maps(5).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable

from ..limits.base import Breach
from ..sandbox.inside import open_beneath

MOST_ENTRIES = 200_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A look may take a tenth of the supervisor's time, and comes sooner when the disk fills.
_REST = 10
_SOONEST = 0.25
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EAGAIN)


class DiskScratch:
    """Watches the size of a scratch folder on disk.

    Args:
        folder: the folder on the host.
        limit: bytes that it may hold.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._next = 0.0
        self._soonest = 0.0
        self._free = 0

    def check(self, pids: Iterable[int]) -> Breach | None:
        """The breach, if it holds more than it may. Most calls return at once; see `_REST`.

        Args:
            pids: the sandbox's processes, whose deleted files count as well.
        """
        now = time.monotonic()
        if now < self._soonest or (now < self._next and not self._filled()):
            return None
        problem = self._look(pids)
        end = time.monotonic()
        self._soonest = end + max(_SOONEST, 2 * (end - now))
        self._next = end + max(_SOONEST, _REST * (end - now))
        if not problem:
            return None
        return Breach(budget="storage", message=f"storage budget reached: scratch {problem}", fatal=True)

    def _filled(self) -> bool:
        """Whether the file system lost an eighth of the limit since the last look."""
        try:
            return self._free - self._now_free() > self._limit // 8
        except OSError:
            return True

    def _now_free(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bfree * found.f_frsize

    def _look(self, pids: Iterable[int]) -> str:
        try:
            self._free = self._now_free()
            top = os.open(self._folder, _FOLDER)
        except OSError as error:
            return f"cannot be looked at ({error.strerror})"
        try:
            used, entries, problem = _measure(top, self._limit)
            if not problem:
                used += _deleted(pids, os.fstat(top).st_dev)
        finally:
            os.close(top)
        if problem:
            return problem
        if used > self._limit or entries > MOST_ENTRIES:
            return (
                f"holds {used >> 20} MiB in {entries} entries, allowed are {self._limit >> 20} MiB and "
                f"{MOST_ENTRIES} entries"
            )
        return ""


def _measure(top: int, limit: int) -> tuple[int, int, str]:
    """Bytes and entries, counted until either is too many; and why they cannot be counted."""
    used = entries = 0
    waiting = [b"."]
    while waiting and used <= limit and entries <= MOST_ENTRIES:
        name = waiting.pop()
        try:
            folder = _open(top, name)
        except OSError as error:
            if error.errno in _GONE:
                continue
            if error.errno == errno.ENAMETOOLONG:
                return used, entries, "is nested too deeply to be looked at"
            return used, entries, f"has a folder that cannot be looked at ({error.strerror})"
        try:
            more, size = _count(folder, name, waiting, MOST_ENTRIES + 1 - entries)
        finally:
            os.close(folder)
        entries += more
        used += size
    return used, entries, ""


def _count(folder: int, name: bytes, waiting: list[bytes], most: int) -> tuple[int, int]:
    """Entries (at most `most`) and bytes of one folder; its folders are added to `waiting`."""
    used = entries = 0
    with os.scandir(folder) as found:
        for entry in found:
            entries += 1
            try:
                here = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # gone again
            used += here.st_blocks * 512
            if stat.S_ISDIR(here.st_mode):
                waiting.append(name + b"/" + os.fsencode(entry.name))
            if entries >= most:
                break
    return entries, used


def _open(top: int, name: bytes) -> int:
    """Open a folder below `top`; its owner's rights are put back when they were taken away. Raises OSError."""
    try:
        return open_beneath(top, name, _FOLDER)
    except PermissionError:
        _allow(top, name)
        return open_beneath(top, name, _FOLDER)


def _allow(top: int, name: bytes) -> None:
    place = open_beneath(top, name, _PLACE)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
    finally:
        os.close(place)


def _deleted(pids: Iterable[int], device: int) -> int:
    """Bytes of files on `device` that have no name any more and that a process holds open or mapped."""
    sizes: dict[int, int] = {}
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    here = os.stat(entry.path)
                    if here.st_dev == device and not here.st_nlink:
                        sizes[here.st_ino] = here.st_blocks * 512
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                if not line.endswith(b" (deleted)\n"):
                    continue
                place, _, _, where, inode = line.split(None, 5)[:5]
                if where.decode() == number and int(inode) not in sizes:
                    first, _, last = place.partition(b"-")
                    sizes[int(inode)] = int(last, 16) - int(first, 16)
    return sum(sizes.values())


def remove_tree(folder: str) -> bool:
    """Remove a folder and all that is in it; whether it is gone. Nothing may be writing there any more."""
    try:
        top = os.open(folder, _PLACE)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        os.chmod(f"/proc/self/fd/{top}", 0o700)
        inner = os.open(".", _FOLDER, dir_fd=top)
        try:
            _empty(inner)
        finally:
            os.close(inner)
        os.rmdir(folder)
    except OSError:
        return False
    finally:
        os.close(top)
    return not os.path.lexists(folder)


def _empty(top: int) -> None:
    """Remove everything in `top`. Folders in folders are first moved up, so that depth never counts."""
    number = 0
    while names := _clear(top):
        for name in names:
            place = os.open(name, _PLACE, dir_fd=top)
            try:
                os.chmod(f"/proc/self/fd/{place}", 0o700)
                folder = os.open(".", _FOLDER, dir_fd=place)
            finally:
                os.close(place)
            try:
                for inner in _clear(folder):
                    _move_up(folder, inner, top, number := number + 1)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _clear(folder: int) -> list[bytes]:
    """Unlink what is no folder; the names of the folders."""
    folders = []
    for name in [os.fsencode(entry) for entry in os.listdir(folder)]:
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            folders.append(name)
    return folders


def _move_up(folder: int, name: bytes, top: int, number: int) -> None:
    place = os.open(name, _PLACE, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)  # moving a folder changes its `..`
    finally:
        os.close(place)
    while True:
        try:
            os.rename(
                name, b".%d.%s" % (number, os.urandom(6).hex().encode()), src_dir_fd=folder, dst_dir_fd=top
            )
        except FileExistsError:
            continue
        return

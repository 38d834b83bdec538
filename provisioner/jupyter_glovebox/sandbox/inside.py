"""Opening files without following links: in a sandbox, and on the host when something is mounted.

Source: openat2(2), Linux 5.6.
"""

from __future__ import annotations

import ctypes
import os

_SYS_OPENAT2 = 437
_NO_MAGICLINKS = 0x02
_NO_SYMLINKS = 0x04
_BENEATH = 0x08
_IN_ROOT = 0x10
# A rename elsewhere in the tree makes the kernel give up a safe walk with EAGAIN.
_ATTEMPTS = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _openat2(dir_fd: int, path: str | bytes, flags: int, resolve: int) -> int:
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError("embedded null byte")
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    for _ in range(_ATTEMPTS):
        fd = int(
            _libc.syscall(
                ctypes.c_long(_SYS_OPENAT2),
                ctypes.c_long(dir_fd),
                ctypes.c_char_p(raw),
                ctypes.byref(how),
                ctypes.c_size_t(ctypes.sizeof(how)),
            )
        )
        if fd >= 0:
            return fd
        error = ctypes.get_errno()
        if error not in (11, 4):  # EAGAIN, EINTR
            break
    raise OSError(error, os.strerror(error), path)


def open_inside(root_fd: int, path: str | bytes, flags: int) -> int:
    """Open a name inside a sandbox, as a process there would see it, without any link on the way.

    Args:
        root_fd: the sandbox's root (`Sandbox.root_fd`).
        path: name inside; absolute and relative mean the same.
        flags: as for open(2); nothing is created (close-on-exec is added).

    Returns:
        A descriptor that the caller closes.

    Raises:
        OSError: as openat2(2); ELOOP for a link anywhere in the name.
        ValueError: the name holds a NUL byte.
    """
    return _openat2(root_fd, path, flags & ~os.O_CREAT, _IN_ROOT | _NO_SYMLINKS | _NO_MAGICLINKS)


def open_following(root_fd: int, path: str | bytes, flags: int) -> int:
    """Open a name inside a sandbox as a process there would, following its links; never for what is trusted.

    Raises:
        OSError: as openat2(2); ELOOP for a magic link of /proc.
        ValueError: the name holds a NUL byte.
    """
    return _openat2(root_fd, path, flags & ~os.O_CREAT, _IN_ROOT | _NO_MAGICLINKS)


def open_beneath(dir_fd: int, path: str | bytes, flags: int) -> int:
    """Open a relative name below a folder, without links and without leaving the folder.

    Raises:
        OSError: as openat2(2); ELOOP for a link, EXDEV for a name that leaves.
    """
    return _openat2(dir_fd, path, flags & ~os.O_CREAT, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)


def open_real(path: str | bytes, flags: int) -> int:
    """Open an absolute host name that must be free of links.

    Raises:
        OSError: as openat2(2); ELOOP for a link anywhere in the name.
    """
    return _openat2(-100, path, flags & ~os.O_CREAT, _NO_SYMLINKS | _NO_MAGICLINKS)  # AT_FDCWD

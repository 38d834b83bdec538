"""connect(2) on behalf of sandboxed programs, so that no race can reach a socket of the host.

A socket file in a granted folder is a way out even where it is mounted read-only, and the host may make
one at any time. A connect that is let pass reads its address and looks up its descriptor again, so
whatever was judged may not be what is done. Therefore none is: the supervisor takes a duplicate of the
socket, and connects it to the copied address. A name leads only to sockets on the sandbox's own writable
mounts, by an opened file and not by its name. Networks need no such care: a socket stays in the network
namespace in which it was made.

Datagram sockets, which could be sent anywhere without a connect, are refused by the deny filter.

Sources: unix(7), pidfd_getfd(2) Linux 5.6, pidfd_open(2), openat2(2), proc_pid_fdinfo(5).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
from collections.abc import Callable

from ..sandbox.base import Mounted
from ..sandbox.inside import open_following, open_inside

_SYS_PIDFD_GETFD = 438
_PIDFD_THREAD = os.O_EXCL  # Linux 6.9
_UNIX = socket.AF_UNIX.to_bytes(2, "little")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class ForeignSocketError(Exception):
    """The name leads to something that is not on a mount of the sandbox's own. `args[0]`: the name behind all links."""


class Connector:
    """Connects sockets of one sandbox. Used by several threads at once.

    Args:
        root_fd: O_PATH descriptor of the sandbox's root.
        mounts: the sandbox's mounts.

    Raises:
        OSError: a writable mount cannot be opened.
    """

    def __init__(self, root_fd: int, mounts: tuple[Mounted, ...]) -> None:
        self._root_fd = root_fd
        self._own: set[int] = set()
        for mount in mounts:
            if mount.writable:
                fd = open_inside(root_fd, mount.target, os.O_PATH)
                try:
                    self._own.add(_mount_id(fd))
                finally:
                    os.close(fd)

    def take(self, pid: int, number: int, still_waiting: Callable[[], bool]) -> int:
        """A duplicate of a task's descriptor, which the caller closes.

        Args:
            pid: the task, as the host sees it.
            number: its descriptor, as the register holds it.
            still_waiting: whether the task's call waits; asked once its id cannot be given away any more.

        Raises:
            OSError: EBADF, or ENOTSOCK, or why the kernel refuses.
        """
        task = _pidfd(pid)
        try:
            if not still_waiting():
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
            fd = int(
                _libc.syscall(
                    ctypes.c_long(_SYS_PIDFD_GETFD), ctypes.c_long(task), ctypes.c_int(number & 0xFFFFFFFF),
                    ctypes.c_long(0),
                )
            )  # fmt: skip
            if fd < 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
        finally:
            os.close(task)
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        return fd

    def connect(self, fd: int, address: bytes, pid: int) -> int:
        """Connect; 0 or an errno. Waits as the socket would.

        Args:
            fd: the socket, from `take`.
            address: struct sockaddr, copied from the task.
            pid: the task, whose working folder relative names mean.

        Raises:
            ForeignSocketError: the name does not lead to one of the sandbox's own sockets.
        """
        if address[:2] != _UNIX or not address[2:3].strip(b"\0"):
            # A network address, an abstract name: they mean what is in the socket's network namespace.
            return _connect(fd, address)
        try:
            target = self._open(os.fsdecode(address[2:].split(b"\0")[0]), pid)
        except OSError as error:
            return error.errno or errno.EACCES
        try:
            return _connect(fd, _UNIX + b"/proc/self/fd/%d\0" % target)
        finally:
            os.close(target)

    def _open(self, name: str, pid: int) -> int:
        if not name.startswith("/"):
            name = f"{os.readlink(f'/proc/{pid}/cwd')}/{name}"
        fd = open_following(self._root_fd, name, os.O_PATH)
        try:
            if _mount_id(fd) not in self._own:
                raise ForeignSocketError(os.readlink(f"/proc/self/fd/{fd}"))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except BaseException:
            os.close(fd)
            raise
        return fd


def waits(fd: int) -> bool:
    """Whether a connect of this socket may wait: neither a datagram nor O_NONBLOCK."""
    kind, size = ctypes.c_int(), ctypes.c_uint32(4)
    _libc.getsockopt(fd, socket.SOL_SOCKET, socket.SO_TYPE, ctypes.byref(kind), ctypes.byref(size))
    return kind.value != socket.SOCK_DGRAM and os.get_blocking(fd)


def _connect(fd: int, address: bytes) -> int:
    if _libc.connect(fd, address, len(address)) == 0:
        return 0
    return ctypes.get_errno()


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid, _PIDFD_THREAD)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with open(f"/proc/{pid}/status", "rb") as file:
        group = next(int(line[5:]) for line in file if line.startswith(b"Tgid:"))
    return os.pidfd_open(group)


def _mount_id(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        return next(int(line[7:]) for line in file if line.startswith(b"mnt_id:"))

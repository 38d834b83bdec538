"""Seccomp user notification, in plain Python: receive, read the caller's memory, answer.

Sources: seccomp_unotify(2), process_vm_readv(2), linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct

_RECV, _SEND, _ID_VALID, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082102, 0x40082104
_SYNC_WAKE_UP = 1
_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip


class Call:
    """One watched call of one task. `pid` is the task's id as the host sees it."""

    __slots__ = ("args", "id", "nr", "pid")

    def __init__(self, ident: int, pid: int, nr: int, args: tuple[int, ...]) -> None:
        self.id = ident
        self.pid = pid
        self.nr = nr
        self.args = args


class Listener:
    """A seccomp listener. One thread uses it.

    Args:
        fd: the listener; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray(_NOTIFICATION.size)
        self._zero = bytes(_NOTIFICATION.size)
        self._memory = ctypes.create_string_buffer(_PAGE)
        self._local = _Iovec(ctypes.addressof(self._memory), 0)
        self._remote = _Iovec(0, 0)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        try:
            # The argument is the value itself; without it every answer waits for the scheduler (Linux 6.6).
            fcntl.ioctl(fd, _SET_FLAGS, _SYNC_WAKE_UP)
        except OSError:
            pass  # slower, not less

    def receive(self, timeout_ms: int) -> Call | None:
        """The next call; None when none came in time or its task died meanwhile.

        Raises:
            EOFError: no task is left that the filter watches.
            OSError: the listener cannot be used.
        """
        ready = self._poll.poll(timeout_ms)
        if not ready:
            return None
        if ready[0][1] & (select.POLLHUP | select.POLLERR):
            raise EOFError
        self._buffer[:] = self._zero
        try:
            fcntl.ioctl(self.fd, _RECV, self._buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise
        ident, pid, _, nr, _, _, *args = _NOTIFICATION.unpack(self._buffer)
        return Call(ident, pid, nr, tuple(args))

    def let_pass(self, call: Call) -> None:
        """Let the kernel do the call as it is; the mount namespace decides."""
        self._answer(struct.pack("=QqiI", call.id, 0, 0, _CONTINUE))

    def refuse(self, call: Call, number: int) -> None:
        """Answer with an errno."""
        self._answer(struct.pack("=QqiI", call.id, 0, -number, 0))

    def _answer(self, answer: bytes) -> None:
        try:
            fcntl.ioctl(self.fd, _SEND, answer)
        except OSError as error:
            # The caller died or was interrupted before the answer: nothing to answer.
            if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
                raise

    def valid(self, call: Call) -> bool:
        """Whether the task still waits: what was read from its memory then was its own."""
        try:
            fcntl.ioctl(self.fd, _ID_VALID, struct.pack("=Q", call.id))
        except OSError:
            return False
        return True

    def read(self, pid: int, address: int, length: int) -> bytes:
        """Up to `length` (at most 4096) bytes of a task's memory; fewer at the end of its mapping."""
        if not address or address >= 1 << 63:
            return b""
        self._local.length = length
        self._remote.base = address
        self._remote.length = length
        count = _readv(pid, self._local, 1, self._remote, 1, 0)
        if count < 0:
            return self._read_mem(pid, address, length)
        return self._memory.raw[:count]

    @staticmethod
    def _read_mem(pid: int, address: int, length: int) -> bytes:
        try:
            fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.pread(fd, length, address)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def string(self, pid: int, address: int) -> bytes | None:
        """A NUL-terminated string; None when it cannot be read or is longer than PATH_MAX (4096)."""
        text = b""
        while len(text) < _PAGE:
            # Never across a page's end in one go: what lies behind may not be mapped.
            part = self.read(pid, address + len(text), min(256, _PAGE - (address + len(text)) % _PAGE))
            end = part.find(b"\0")
            if end >= 0:
                return text + part[:end]
            if not part:
                return None
            text += part
        return None

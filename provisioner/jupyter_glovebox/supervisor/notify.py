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
from collections.abc import Callable, Mapping

_RECV, _SEND, _ID_VALID, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082102, 0x40082104
_SYNC_WAKE_UP = 1
_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_PAGE = 4096
_MOST_MEMORIES = 64

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
        # One byte more than is ever read, and always NUL: `value` ends there.
        self._memory = ctypes.create_string_buffer(_PAGE + 1)
        self._local = _Iovec(ctypes.addressof(self._memory), 0)
        self._remote = _Iovec(0, 0)
        self._memories: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        try:
            # The argument is the value itself; without it every answer waits for the scheduler (Linux 6.6).
            fcntl.ioctl(fd, _SET_FLAGS, _SYNC_WAKE_UP)
        except OSError:
            pass  # slower, not less

    def serve(
        self,
        handle: Callable[[Call], None],
        stopping: Callable[[], bool],
        *,
        quick: Mapping[int, tuple[int, int]],
        writes: int,
        readable: tuple[bytes, ...],
    ) -> None:
        """Receive calls until no task is left that the filter watches, or until `stopping()`.

        Nearly all calls open installed files for reading. They pass after one look, in this loop and
        without another function: a tenth of the cost of each goes to every name that is looked up here.

        Args:
            handle: answers every other call.
            stopping: asked twice a second while no call comes.
            quick: calls that may pass at once: number to (argument of the path, argument of the flags).
            writes: flags that make a call not quick.
            readable: beginnings of paths that may be read.

        Raises:
            OSError: the listener cannot be used.
        """
        fd, poll, ioctl, pread = self.fd, self._poll.poll, fcntl.ioctl, os.pread
        buffer, zero, unpack, pack = self._buffer, self._zero, _NOTIFICATION.unpack, _ANSWER.pack
        memories, ending = self._memories, select.POLLHUP | select.POLLERR
        while True:
            ready = poll(500)
            if not ready:
                if stopping():
                    return
                continue
            # After the last task has gone RECV would answer ENOENT for ever.
            if ready[0][1] & ending:
                return
            buffer[:] = zero
            try:
                ioctl(fd, _RECV, buffer)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                raise
            fields = unpack(buffer)
            pid, place = fields[1], quick.get(fields[3])
            if place is not None and not fields[6 + place[1]] & writes:
                memory = memories.get(pid)
                if memory is not None:
                    try:
                        text = pread(memory, 256, fields[6 + place[0]])
                    except (OSError, OverflowError):
                        text = b""
                    # A name that does not end in what was read could lead anywhere.
                    end = text.find(b"\0")
                    path = text[:end] if end > 0 else b""
                    if path.startswith(readable) and b"/.." not in path:
                        try:
                            ioctl(fd, _SEND, pack(fields[0], 0, 0, _CONTINUE))
                        except OSError as error:
                            if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
                                raise
                        continue
                    if not text:
                        self.forget(pid)  # the program is another one by now
                else:
                    self._remember(pid)
            handle(Call(fields[0], pid, fields[3], fields[6:]))

    def _remember(self, pid: int) -> None:
        """Keep a task's memory open: proc_pid_mem(5). It stays that of the program that runs now."""
        if len(self._memories) >= _MOST_MEMORIES:
            self.forget(next(iter(self._memories)))
        try:
            self._memories[pid] = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # the other way of reading still works, or says why not

    def forget(self, pid: int) -> None:
        """Drop what is kept of a task; called before it becomes another program."""
        memory = self._memories.pop(pid, None)
        if memory is not None:
            os.close(memory)

    def abandon(self) -> None:
        """End the listening: waiting and later calls fail with ENOSYS. Closed, never open, and nothing hangs.

        The number stays taken, since it is the caller's to close.
        """
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, self.fd, inheritable=False)
        os.close(null)

    def close(self) -> None:
        """Drop what is kept of every task; idempotent."""
        while self._memories:
            self.forget(next(iter(self._memories)))

    def let_pass(self, call: Call) -> None:
        """Let the kernel do the call as it is; the mount namespace decides."""
        self._answer(_ANSWER.pack(call.id, 0, 0, _CONTINUE))

    def refuse(self, call: Call, number: int) -> None:
        """Answer with an errno."""
        self._answer(_ANSWER.pack(call.id, 0, -number, 0))

    def succeed(self, call: Call) -> None:
        """Answer that the call was done; it returns 0."""
        self._answer(_ANSWER.pack(call.id, 0, 0, 0))

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
        return ctypes.string_at(self._local.base, count)

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
        if 0 < address < 1 << 63 and address % _PAGE <= _PAGE - 256:
            # The usual case in one call: this is the cost of every watched open.
            self._remote.base = address
            self._local.length = self._remote.length = 256
            if _readv(pid, self._local, 1, self._remote, 1, 0) == 256:
                text = self._memory.value
                if len(text) < 256:
                    return text
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

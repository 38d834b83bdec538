"""Observation: answers watched calls, and turns what was denied into events.

One thread answers; another makes events, so that no program ever waits for the ledger. Memory is
bounded: beyond a number of waiting events they are counted, and the count is an event itself. If
observation fails, access still is denied by the mount namespace, and the posture says so.
"""

from __future__ import annotations

import errno
import os
import posixpath
import queue
import threading
import time
from collections.abc import Callable

from ..ledger.events import Cell, Event, Process, escape
from ..limits.base import ControlState
from ..manifest.plan import Plan
from ..sandbox.base import Mounted
from ..sandbox.syscalls import WATCHED, WATCHED_WITH_ADDRESS, column
from .classify import Classifier, Finding, dns_question
from .connecting import Connector, ForeignSocketError, waits
from .notify import Call, Listener

_AT_FDCWD = -100
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_MOST_WAITING = 4096
_MOST_PENDING = 2048
_COALESCE_SECONDS = 1.0
_LOOKUP_SECONDS = 0.1
_MOST_CONNECTING = 32
_SOCKADDR_STORAGE = 128  # the longest address that the kernel takes
# Different events that the ledger takes of one kernel: at once, and per second after that. A cell that
# floods it must not fill the disk, nor hide among the rest what is sensitive.
_EVENTS = (1000, 10.0)
_SENSITIVE_EVENTS = (200, 2.0)

# Where each call has its paths: (argument of the directory descriptor or None, argument of the path).
_PLACES: dict[str, tuple[tuple[int | None, int], ...]] = {
    "open": ((None, 0),), "creat": ((None, 0),), "openat": ((0, 1),), "openat2": ((0, 1),),
    "execve": ((None, 0),), "execveat": ((0, 1),),
    "unlink": ((None, 0),), "rmdir": ((None, 0),), "unlinkat": ((0, 1),),
    "rename": ((None, 0), (None, 1)), "renameat": ((0, 1), (2, 3)), "renameat2": ((0, 1), (2, 3)),
    "mkdir": ((None, 0),), "mkdirat": ((0, 1),), "mknod": ((None, 0),), "mknodat": ((0, 1),),
    "link": ((None, 0), (None, 1)), "linkat": ((0, 1), (2, 3)),
    "symlink": ((None, 1),), "symlinkat": ((1, 2),),
    "truncate": ((None, 0),), "chmod": ((None, 0),), "fchmodat": ((0, 1),), "fchmodat2": ((0, 1),),
    "chown": ((None, 0),), "lchown": ((None, 0),), "fchownat": ((0, 1),),
    "utime": ((None, 0),), "utimes": ((None, 0),), "utimensat": ((0, 1),), "futimesat": ((0, 1),),
}  # fmt: skip


_AT_SYMLINK_NOFOLLOW = 0x100
_MAKES_NAME = frozenset(("creat", "mkdir", "mkdirat", "mknod", "mknodat", "symlink", "symlinkat"))
_NEVER_FOLLOWS = frozenset(
    ("unlink", "unlinkat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "lchown")
)
# The argument in which AT_SYMLINK_NOFOLLOW may be.
_NOFOLLOW_FLAG = {"fchownat": 4, "utimensat": 3, "fchmodat2": 3}


class _Waiting:
    """An event to be, with what was known when the call was answered."""

    __slots__ = ("cell", "finding", "process", "time")

    def __init__(self, finding: Finding, cell: Cell | None, process: Process) -> None:
        self.finding = finding
        self.cell = cell
        self.process = process
        self.time = time.time()


class _Allowance:
    """So many at once, and so many per second after that."""

    def __init__(self, most: int, per_second: float) -> None:
        self._most = most
        self._per_second = per_second
        self._left = float(most)
        self._at = time.monotonic()

    def take(self) -> bool:
        """Whether there is one left; takes it."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Repeats:
    """How often the same came again after it was first reported."""

    __slots__ = ("count", "first")

    def __init__(self, first: _Waiting) -> None:
        self.first = first
        self.count = 0


class Observer:
    """Serves one listener until the last watched task has gone.

    Args:
        listener_fd: the seccomp listener.
        root_fd: O_PATH descriptor of the sandbox's root.
        mounts: the sandbox's mounts.
        plan: the plan.
        kernel_id: for events.
        current_cell: gives the running cell; called from the answering thread.
        sink: takes each event; called from the reporting thread.
        homes: the user's home folders.
    """

    def __init__(
        self,
        listener_fd: int,
        *,
        root_fd: int,
        mounts: tuple[Mounted, ...],
        plan: Plan,
        kernel_id: str,
        current_cell: Callable[[], Cell | None],
        sink: Callable[[Event], None],
        homes: tuple[str, ...],
    ) -> None:
        self._listener = Listener(listener_fd)
        self._classifier = Classifier(plan, mounts, root_fd, homes)
        self._connector = Connector(root_fd, mounts)
        self._connecting = threading.BoundedSemaphore(_MOST_CONNECTING)
        self._plan = plan
        self._digest = plan.digest
        self._kernel_id = kernel_id
        self._current_cell = current_cell
        self._sink = sink
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._dropped = 0
        self._unreported = 0
        self._allowances = {False: _Allowance(*_EVENTS), True: _Allowance(*_SENSITIVE_EVENTS)}
        self._failed = ""
        self._stopping = False
        self._lookups: dict[int, tuple[float, Cell | None, Process]] = {}
        at = column(os.uname().machine)
        self._calls: dict[int, str] = {}
        for name, (x86, arm, _) in [*WATCHED.items(), *WATCHED_WITH_ADDRESS.items()]:
            if (number := (x86, arm)[at]) is not None:
                self._calls[number] = name
        # Nearly all opens are reads of installed files: they pass after one look. (path, flags) arguments.
        self._quick = {n: (0, 1) if name == "open" else (1, 2) for n, name in self._calls.items()
                       if name in ("open", "openat")}  # fmt: skip
        self._threads = [
            threading.Thread(target=self._answer_all, name="observation", daemon=True),
            threading.Thread(target=self._report_all, name="reporting", daemon=True),
        ]

    def start(self) -> None:
        """Start answering; must be running before the command is released."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for both threads; call it when every task has been killed. Reports what is still waiting."""
        self._stopping = True
        self._threads[0].join(5.0)
        self._waiting.put(None)
        self._threads[1].join(10.0)

    def state(self) -> ControlState:
        """How complete the observation is, for the posture."""
        if self._failed:
            return ControlState("soft", f"observation stopped: {self._failed}", "Restart the kernel.")
        return ControlState("enforced", "opens, changes, exec and connect are seen (level standard)")

    # -- answering ------------------------------------------------------------------------------

    def _answer_all(self) -> None:
        listener = self._listener
        try:
            listener.serve(
                lambda call: self._answer(listener, call),
                lambda: self._stopping,
                quick=self._quick,
                writes=_WRITE_FLAGS,
                readable=self._classifier.readable(),
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody answers any more
            listener.abandon()
            self._failed = f"{type(error).__name__}: {error}"
            self._waiting.put(_Waiting(_failure(self._failed), None, Process(pid=0, comm="", cmdline="")))
        finally:
            listener.close()

    def _answer(self, listener: Listener, call: Call) -> None:
        if self._calls.get(call.nr) == "connect":
            self._answer_connect(listener, call)
            return
        try:
            finding = self._judge(listener, call)
        except Exception as error:  # noqa: BLE001 - a surprise in hostile data must not stop observation
            finding = _failure(f"a call could not be judged: {type(error).__name__}: {error}")
        if finding is None:
            listener.let_pass(call)
        else:
            self._tell(listener, call, finding)

    def _tell(self, listener: Listener, call: Call, finding: Finding) -> None:
        """Answer first, report afterwards."""
        process = _process(call.pid)
        cell = self._current_cell()
        if not listener.valid(call):
            return  # the task is gone, and what was read may be another's
        if finding.error is None:
            listener.let_pass(call)
        else:
            listener.refuse(call, finding.error)
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(_Waiting(finding, cell, process))
        else:
            self._dropped += 1

    def _judge(self, listener: Listener, call: Call) -> Finding | None:
        name = self._calls.get(call.nr)
        if name is None:
            return None
        if name == "sendto":
            return self._sendto(listener, call)
        if name == "sendmmsg":
            return self._sendmmsg(listener, call)
        operation = WATCHED[name][2]
        if operation == "exec":
            listener.forget(call.pid)
        writes, creates, follows = _intent(name, listener, call)
        for number, (folder, place) in enumerate(_PLACES[name]):
            raw = listener.string(call.pid, call.args[place])
            if not raw:
                continue
            path = _absolute(raw, call.pid, None if folder is None else call.args[folder])
            if path is None:
                continue
            new_name = creates or (number == 1 and operation in ("rename", "link"))
            reads_only = number == 0 and operation == "link"
            finding = self._classifier.path(
                operation,
                path,
                writes=writes and not reads_only,
                creates=new_name and not reads_only,
                follows=follows,
            )
            if finding is not None:
                return finding
        return None

    def _answer_connect(self, listener: Listener, call: Call) -> None:
        """A connect is refused or done here, never let pass: see `connecting`."""
        length = call.args[2] & 0xFFFFFFFF
        if length > _SOCKADDR_STORAGE:
            listener.refuse(call, errno.EINVAL)
            return
        address = listener.read(call.pid, call.args[1], length) if length else b""
        if len(address) < length:
            listener.refuse(call, errno.EFAULT)
            return
        finding = self._classifier.address(address)
        if finding is not None:
            self._tell(listener, call, finding)
            return
        if address[2:4] == b"\0\x35" and address[:2] in (b"\x02\0", b"\x0a\0"):
            # The resolver's connect to a name server that is not there; its query follows.
            self._lookups[call.pid] = (time.monotonic(), self._current_cell(), _process(call.pid))
            if len(self._lookups) > 256:
                self._lookups.pop(next(iter(self._lookups)), None)
        try:
            fd = self._connector.take(call.pid, call.args[0], lambda: listener.valid(call))
        except OSError as error:
            listener.refuse(call, error.errno or errno.EACCES)
            return
        if not waits(fd):
            self._connect(listener, call, fd, address)
        elif self._connecting.acquire(blocking=False):
            threading.Thread(
                target=self._connect_slowly,
                args=(listener, call, fd, address),
                name="connecting",
                daemon=True,
            ).start()
        else:
            os.close(fd)
            listener.refuse(call, errno.EAGAIN)

    def _connect_slowly(self, listener: Listener, call: Call, fd: int, address: bytes) -> None:
        try:
            self._connect(listener, call, fd, address)
        except OSError:
            pass  # the listener has been closed: nobody waits any more
        finally:
            self._connecting.release()

    def _connect(self, listener: Listener, call: Call, fd: int, address: bytes) -> None:
        try:
            error = self._connector.connect(fd, address, call.pid)
        except ForeignSocketError as foreign:
            self._tell(listener, call, self._classifier.foreign_socket(posixpath.normpath(foreign.args[0])))
            return
        finally:
            os.close(fd)
        if error:
            listener.refuse(call, error)
        else:
            listener.succeed(call)

    def _sendto(self, listener: Listener, call: Call) -> Finding | None:
        address = listener.read(call.pid, call.args[4], min(call.args[5], _SOCKADDR_STORAGE))
        finding = self._classifier.address(address)
        if finding is None and address[2:4] == b"\0\x35":
            name = dns_question(listener.read(call.pid, call.args[1], min(call.args[2], 512)))
            return None if name is None else self._classifier.lookup(name)
        return finding

    def _sendmmsg(self, listener: Listener, call: Call) -> Finding | None:
        """The resolver of the C library sends its two queries by one sendmmsg (struct mmsghdr)."""
        if call.pid not in self._lookups:
            return None
        header = listener.read(call.pid, call.args[1], 56)
        if len(header) < 32 or int.from_bytes(header[24:32], "little") < 1:
            return None
        vector = listener.read(call.pid, int.from_bytes(header[16:24], "little"), 16)
        if len(vector) < 16:
            return None
        length = min(int.from_bytes(vector[8:16], "little"), 512)
        name = dns_question(listener.read(call.pid, int.from_bytes(vector[:8], "little"), length))
        if name is None:
            return None
        self._lookups.pop(call.pid, None)
        return self._classifier.lookup(name)

    # -- reporting ------------------------------------------------------------------------------

    def _report_all(self) -> None:
        pending: dict[tuple[object, ...], _Repeats] = {}
        deadline = time.monotonic() + _COALESCE_SECONDS
        ending = False
        while not ending:
            try:
                waiting = self._waiting.get(timeout=_LOOKUP_SECONDS)
                ending = waiting is None
            except queue.Empty:
                waiting = None
            if waiting is not None:
                self._take(waiting, pending)
            self._late_lookups(everything=ending)
            due = ending or time.monotonic() >= deadline
            if due or len(pending) > _MOST_PENDING:
                self._flush(pending)
            if due:
                self._confess()
                deadline = time.monotonic() + _COALESCE_SECONDS

    def _take(self, waiting: _Waiting, pending: dict[tuple[object, ...], _Repeats]) -> None:
        """The first of its kind is reported at once; the same again is counted and reported once more."""
        finding = waiting.finding
        message = waiting.cell.msg_id if waiting.cell else None
        key = (finding.event_class, finding.operation, finding.target, message, waiting.process.comm)
        known = pending.get(key)
        if known is None:
            pending[key] = _Repeats(waiting)
            self._emit(waiting, 1)
        else:
            known.count += 1

    def _flush(self, pending: dict[tuple[object, ...], _Repeats]) -> None:
        for repeats in pending.values():
            if repeats.count:
                self._emit(repeats.first, repeats.count)
        pending.clear()

    def _emit(self, waiting: _Waiting, count: int) -> None:
        if self._allowances[waiting.finding.sensitive].take():
            self._deliver(waiting, count)
        else:
            self._unreported += count

    def _deliver(self, waiting: _Waiting, count: int) -> None:
        try:
            self._sink(self._event(waiting, count))
        except Exception as error:  # noqa: BLE001 - later events may still find their way
            self._failed = f"an event could not be recorded: {type(error).__name__}: {error}"
            self._unreported += count

    def _confess(self) -> None:
        """What was not reported one by one is reported as a number."""
        dropped, self._dropped = self._dropped, 0
        unreported, self._unreported = self._unreported + dropped, 0
        if unreported:
            finding = _failure(f"{unreported} blocked accesses were not recorded one by one")
            self._deliver(_Waiting(finding, None, Process(pid=0, comm="", cmdline="")), unreported)

    def _late_lookups(self, *, everything: bool) -> None:
        """A lookup whose name was not seen (one query, sent by send(2)) is reported without it."""
        now = time.monotonic()
        for pid, (since, cell, process) in list(self._lookups.items()):
            if (everything or now - since > _LOOKUP_SECONDS) and self._lookups.pop(pid, None) is not None:
                self._emit(_Waiting(self._classifier.lookup("(a name)"), cell, process), 1)

    def _event(self, waiting: _Waiting, count: int) -> Event:
        finding = waiting.finding
        return Event(
            time=waiting.time,
            event_class=finding.event_class,
            operation=finding.operation,
            target=finding.target,
            sensitive=finding.sensitive,
            severity="high" if finding.sensitive else "warning",
            count=count,
            errno=finding.told or None,
            rule=finding.rule,
            suggestion=finding.suggestion,
            kernel_id=self._kernel_id,
            notebook=self._plan.notebook,
            plan=self._digest,
            cell=waiting.cell,
            process=waiting.process if waiting.process.pid else None,
        )


def _failure(text: str) -> Finding:
    return Finding("observation", "observe", escape(text), None, "", "coverage is partial", "")


def _intent(name: str, listener: Listener, call: Call) -> tuple[bool, bool, bool]:
    """Whether a call changes something, whether it makes its name, and whether it follows a last link."""
    if name in ("open", "openat", "openat2"):
        if name == "openat2":
            flags = int.from_bytes(listener.read(call.pid, call.args[2], 8), "little")
        else:
            flags = call.args[1 if name == "open" else 2]
        exclusive = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
        return bool(flags & _WRITE_FLAGS), bool(flags & os.O_CREAT), not (exclusive or flags & os.O_NOFOLLOW)
    if name in ("execve", "execveat"):
        return False, False, True
    if name in _MAKES_NAME:
        return True, True, name == "creat"
    if name in _NEVER_FOLLOWS:
        return True, False, False
    if name in _NOFOLLOW_FLAG:
        return True, False, not call.args[_NOFOLLOW_FLAG[name]] & _AT_SYMLINK_NOFOLLOW
    return True, False, True


def _absolute(raw: bytes, pid: int, folder: int | None) -> str | None:
    """The normalised absolute name a task means; None when its folder cannot be told."""
    path = os.fsdecode(raw)
    if not path.startswith("/"):
        number = _AT_FDCWD if folder is None else (folder & 0xFFFFFFFF) - ((folder & 0x80000000) << 1)
        try:
            base = os.readlink(f"/proc/{pid}/cwd" if number == _AT_FDCWD else f"/proc/{pid}/fd/{number}")
        except OSError:
            return None
        if not base.startswith("/"):
            return None
        path = f"{base}/{path}"
    if "//" in path or "/." in path or path.endswith("/"):
        path = posixpath.normpath(path)
        if path.startswith("//"):
            path = path[1:]
    return path


def _process(pid: int) -> Process:
    """Who called. The text is hostile, and bounded."""
    comm = cmdline = b""
    group = pid
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            comm = file.read(64).rstrip(b"\n")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            cmdline = file.read(512).rstrip(b"\0").replace(b"\0", b" ")
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file.read(2048).split(b"\n"):
                if line.startswith(b"Tgid:"):
                    group = int(line[5:])
    except (OSError, ValueError):
        pass
    return Process(pid=group, comm=escape(comm), cmdline=escape(cmdline))

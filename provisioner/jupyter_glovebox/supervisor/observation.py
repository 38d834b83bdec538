"""Observation: answers watched calls, and turns what was denied into events.

One thread answers; another makes events, so that no program ever waits for the ledger. Memory is
bounded: beyond a number of waiting events they are counted, and the count is an event itself. If
observation fails, access still is denied by the mount namespace, and the posture says so.
"""

from __future__ import annotations

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
from .notify import Call, Listener

_AT_FDCWD = -100
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_MOST_WAITING = 4096
_MOST_PENDING = 2048
_COALESCE_SECONDS = 1.0
_LOOKUP_SECONDS = 0.1

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


class _Waiting:
    """An event to be, with what was known when the call was answered."""

    __slots__ = ("cell", "finding", "process", "time")

    def __init__(self, finding: Finding, cell: Cell | None, process: Process) -> None:
        self.finding = finding
        self.cell = cell
        self.process = process
        self.time = time.time()


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
        self._plan = plan
        self._digest = plan.digest
        self._kernel_id = kernel_id
        self._current_cell = current_cell
        self._sink = sink
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._dropped = 0
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
        except OSError as error:
            # Calls that nobody answers fail with ENOSYS once the listener closes: closed, never open.
            self._failed = f"{error.strerror}"
            self._waiting.put(_Waiting(_failure(self._failed), None, Process(pid=0, comm="", cmdline="")))
        finally:
            listener.close()

    def _answer(self, listener: Listener, call: Call) -> None:
        try:
            finding = self._judge(listener, call)
        except Exception as error:  # noqa: BLE001 - a surprise in hostile data must not stop observation
            finding = _failure(f"a call could not be judged: {type(error).__name__}: {error}")
        if finding is None:
            listener.let_pass(call)
            return
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
        if name == "connect":
            return self._connect(call, listener.read(call.pid, call.args[1], min(call.args[2], 128)))
        if name == "sendto":
            return self._classifier.address(listener.read(call.pid, call.args[4], min(call.args[5], 128)))
        if name == "sendmmsg":
            return self._sendmmsg(listener, call)
        operation = WATCHED[name][2]
        if operation == "exec":
            listener.forget(call.pid)
        writes, creates = _intent(name, listener, call)
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
                operation, path, writes=writes and not reads_only, creates=new_name and not reads_only
            )
            if finding is not None:
                return finding
        return None

    def _connect(self, call: Call, address: bytes) -> Finding | None:
        finding = self._classifier.address(address)
        if finding is None and address[2:4] == b"\0\x35" and address[:1] in b"\x02\x0a":
            # The resolver's connect to a name server that is not there; its query follows.
            self._lookups[call.pid] = (time.monotonic(), self._current_cell(), _process(call.pid))
            if len(self._lookups) > 256:
                self._lookups.pop(next(iter(self._lookups)), None)
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
            if ending or time.monotonic() >= deadline or len(pending) > _MOST_PENDING:
                self._flush(pending)
                deadline = time.monotonic() + _COALESCE_SECONDS

    def _take(self, waiting: _Waiting, pending: dict[tuple[object, ...], _Repeats]) -> None:
        """The first of its kind is reported at once; the same again is counted and reported once more."""
        finding = waiting.finding
        message = waiting.cell.msg_id if waiting.cell else None
        key = (finding.event_class, finding.operation, finding.target, message, waiting.process.comm)
        known = pending.get(key)
        if known is None:
            pending[key] = _Repeats(waiting)
            self._sink(self._event(waiting, 1))
        else:
            known.count += 1

    def _flush(self, pending: dict[tuple[object, ...], _Repeats]) -> None:
        for repeats in pending.values():
            if repeats.count:
                self._sink(self._event(repeats.first, repeats.count))
        pending.clear()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            finding = _failure(f"{dropped} blocked accesses were not recorded one by one")
            self._sink(self._event(_Waiting(finding, None, Process(pid=0, comm="", cmdline="")), dropped))

    def _late_lookups(self, *, everything: bool) -> None:
        """A lookup whose name was not seen (one query, sent by send(2)) is reported without it."""
        now = time.monotonic()
        for pid, (since, cell, process) in list(self._lookups.items()):
            if (everything or now - since > _LOOKUP_SECONDS) and self._lookups.pop(pid, None) is not None:
                waiting = _Waiting(self._classifier.lookup("(a name)"), cell, process)
                self._sink(self._event(waiting, 1))

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


def _intent(name: str, listener: Listener, call: Call) -> tuple[bool, bool]:
    """Whether a call changes something, and whether it makes its name."""
    if name in ("open", "openat", "openat2"):
        if name == "openat2":
            flags = int.from_bytes(listener.read(call.pid, call.args[2], 8), "little")
        else:
            flags = call.args[1 if name == "open" else 2]
        return bool(flags & _WRITE_FLAGS), bool(flags & os.O_CREAT)
    if name in ("execve", "execveat"):
        return False, False
    return True, name in ("creat", "mkdir", "mkdirat", "mknod", "mknodat", "symlink", "symlinkat")


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

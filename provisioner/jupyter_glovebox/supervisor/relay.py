"""The relay: every message between manager and kernel passes here, verified and signed again.

The manager sees outer ipc endpoints with one key, the kernel has inner ones with another, so neither a
client nor the kernel can speak for the other side. The kernel's sockets lie on a tmpfs of the sandbox;
they are opened below a directory descriptor, without links, and connected by descriptor.

Sources: Jupyter messaging protocol 5.4 (wire format), JEP 65 (iopub_welcome), zmq_socket(3),
zmq_ipc(7), unix(7).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import zmq

from ..ledger.events import Cell, CleanupStep, escape
from .cells import RunningCells
from .spec import Ports

_DELIMITER = b"<IDS|MSG>"
_INNER = {"shell": "k-1", "iopub": "k-2", "stdin": "k-3", "control": "k-4", "hb": "k-5"}
_BATCH = 64
# Enough for a burst of small outputs; beyond it iopub drops, as a kernel's own PUB socket does.
_IOPUB_QUEUE = 20_000
_QUEUE = 10_000
_LINGER_MS = 500
_WAIT_SECONDS = 0.003

OnMessage = Callable[[str, list[Any]], bool]
"""Sees each kernel message (channel, frames from the delimiter on); False drops it."""


class _Side:
    """One direction of one channel: who may sign, and with which key it is signed again."""

    def __init__(self, check: bytes, sign: bytes) -> None:
        self._check = hmac.new(check, digestmod=hashlib.sha256)
        self._sign = hmac.new(sign, digestmod=hashlib.sha256)

    def resign(self, frames: list[Any], at: int) -> bool:
        """Replace the signature at `at`; False when it was wrong."""
        check, sign = self._check.copy(), self._sign.copy()
        for frame in frames[at + 1 : at + 5]:
            check.update(frame)
            sign.update(frame)
        if not hmac.compare_digest(check.hexdigest().encode(), bytes(frames[at])):
            return False
        frames[at] = sign.hexdigest().encode()
        return True


class Relay:
    """Forwards five channels in one thread.

    Args:
        outer: the manager's endpoints and key.
        inner_key: the kernel's key.
        on_cell: called with the running cell, or None, at each change (from the relay's thread).
        on_problem: called with (kind, detail) for a message that was dropped; at most once a second per kind.
        on_message: see `OnMessage`.

    Attributes:
        cells: the running cell.
        display_bytes: bytes of iopub messages that passed.
        ready: set when all channels of the kernel are connected.
    """

    def __init__(
        self,
        outer: Ports,
        inner_key: str,
        *,
        on_cell: Callable[[Cell | None], None],
        on_problem: Callable[[str, str], None],
        on_message: OnMessage | None = None,
    ) -> None:
        self._outer = outer
        self._outer_key = outer.key.encode()
        self._inner_key = inner_key.encode()
        self._on_problem = on_problem
        self._on_message = on_message
        self._context = zmq.Context()
        self._outer_sockets: dict[str, Any] = {}
        self._inner_sockets: dict[str, Any] = {}
        self._fds: list[int] = []
        self._thread: threading.Thread | None = None
        self._stop_read, self._stop_write = os.pipe()
        self._stopping = False
        self._announcement: tuple[str, str] | None = None
        self._announced = threading.Event()
        self._said: dict[str, float] = {}
        self.cells = RunningCells(on_cell)
        self.display_bytes = 0
        self.ready = threading.Event()

    # -- endpoints ------------------------------------------------------------------------------

    def _path(self, channel: str) -> str:
        return f"{self._outer.prefix}-{getattr(self._outer, channel)}"

    def bind(self) -> None:
        """Bind the manager's endpoints, so that clients can connect before the kernel is up."""
        for channel in _INNER:
            socket = self._context.socket(zmq.XPUB if channel == "iopub" else zmq.ROUTER)
            socket.linger = _LINGER_MS
            if channel == "iopub":
                socket.xpub_verbose = 1  # each client's subscription reaches the kernel: JEP 65
                socket.sndhwm = _IOPUB_QUEUE
            else:
                socket.router_handover = 1  # a client that reconnects keeps its identity
                socket.sndhwm = socket.rcvhwm = _QUEUE
            path = self._path(channel)
            if os.path.lexists(path):
                os.unlink(path)
            socket.bind(f"ipc://{path}")
            self._outer_sockets[channel] = socket

    def start(self, sockets_fd: int) -> None:
        """Start the thread; `sockets_fd` is the folder in which the kernel makes its sockets."""
        self._thread = threading.Thread(
            target=self._run, args=(os.dup(sockets_fd),), name="relay", daemon=True
        )
        self._thread.start()

    def _connect(self, folder: int) -> bool:
        """Connect to the kernel's sockets as they appear; False when stopped before."""
        identity = uuid.uuid4().bytes.replace(b"\0", b"\1", 1)
        for channel, name in _INNER.items():
            while (fd := self._open_socket(folder, name)) < 0:
                if self._stopping:
                    return False
                time.sleep(_WAIT_SECONDS)
            self._fds.append(fd)
            socket = self._context.socket(zmq.XSUB if channel == "iopub" else zmq.DEALER)
            socket.linger = 0
            socket.reconnect_ivl = 2  # between bind and listen a socket refuses; milliseconds
            socket.reconnect_ivl_max = 100
            socket.rcvhwm = _IOPUB_QUEUE if channel == "iopub" else _QUEUE
            if channel in ("shell", "control", "stdin"):
                # One name on all three: the kernel asks for input from whoever sent the request.
                socket.setsockopt(zmq.IDENTITY, b"g" + identity)
            socket.connect(f"ipc:///proc/self/fd/{fd}")
            self._inner_sockets[channel] = socket
        return True

    def _open_socket(self, folder: int, name: str) -> int:
        """A descriptor of the socket `name`, -1 while there is none. Links and other files are not followed."""
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return -1
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        self._problem("socket", f"{name} in the kernel's socket folder is not a socket")
        return -1

    def _problem(self, kind: str, detail: str) -> None:
        now = time.monotonic()
        if now - self._said.get(kind, -10.0) >= 1.0:
            self._said[kind] = now
            self._on_problem(kind, detail)

    # -- the loop -------------------------------------------------------------------------------

    def _run(self, folder: int) -> None:
        try:
            if self._connect(folder):
                self.ready.set()
                self._loop()
        except zmq.ZMQError as error:
            if not self._stopping:
                self._problem("relay", f"the relay stopped: {error}")
        finally:
            os.close(folder)

    def _loop(self) -> None:
        to_client = _Side(self._inner_key, self._outer_key)
        to_kernel = _Side(self._outer_key, self._inner_key)
        routes: dict[Any, Callable[[], None]] = {}
        for channel in _INNER:
            outer, inner = self._outer_sockets[channel], self._inner_sockets[channel]
            routes[outer] = self._route(outer, inner, channel, to_kernel, from_kernel=False)
            routes[inner] = self._route(inner, outer, channel, to_client, from_kernel=True)
        poller = zmq.Poller()
        for socket in routes:
            poller.register(socket, zmq.POLLIN)
        poller.register(self._stop_read, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket == self._stop_read:
                    os.read(self._stop_read, 64)
                    if self._announcement is not None:
                        self._announce(*self._announcement)
                        self._announcement = None
                        self._announced.set()
                    if self._stopping:
                        return
                else:
                    routes[socket]()

    def _route(
        self, source: Any, target: Any, channel: str, side: _Side, *, from_kernel: bool
    ) -> Callable[[], None]:
        signed = channel != "hb"
        subscriptions = channel == "iopub" and not from_kernel

        def forward() -> None:
            for _ in range(_BATCH):
                try:
                    frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                if signed and not subscriptions and not self._pass(frames, channel, side, from_kernel):
                    continue
                try:
                    target.send_multipart(frames, zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    self._problem("queue", f"a {channel} message was dropped: its reader is too slow")

        return forward

    def _pass(self, frames: list[Any], channel: str, side: _Side, from_kernel: bool) -> bool:
        """Check, sign and look at one message; False drops it. `frames` are zmq.Frame, replaced in place."""
        who = "kernel" if from_kernel else "client"
        at = next((n for n, f in enumerate(frames[:8]) if len(f) == 9 and f.bytes == _DELIMITER), -1)
        if at < 0 or len(frames) < at + 6:
            self._problem("malformed", f"a {channel} message of the {who} had no valid form")
            return False
        parts = [f.buffer for f in frames[at + 1 : at + 6]]
        if not side.resign(parts, 0):
            self._problem("signature", f"a {channel} message of the {who} had a wrong signature")
            return False
        frames[at + 1] = parts[0]
        if from_kernel and channel == "iopub":
            self.display_bytes += sum(len(f) for f in frames[at + 2 :])
        try:
            self._look(frames, at, channel, from_kernel)
        except (ValueError, KeyError, TypeError, AttributeError):
            self._problem("malformed", f"a {channel} message of the {who} had no valid header")
            return False
        if from_kernel and self._on_message is not None and not self._on_message(channel, frames[at:]):
            return False
        frames[:] = [f if isinstance(f, bytes | zmq.Frame) else bytes(f) for f in frames]
        return True

    # -- the running cell -----------------------------------------------------------------------

    def _look(self, frames: list[Any], at: int, channel: str, from_kernel: bool) -> None:
        """Follow execute requests and the kernel's status; headers of other messages are not decoded."""
        header = bytes(frames[at + 2].buffer)
        if not from_kernel:
            if channel == "shell" and b'"execute_request"' in header:
                self._execute_request(frames, at, json.loads(header))
            return
        if channel == "shell" and b'"execute_reply"' in header:
            # An aborted request is never said to be idle.
            if b'"aborted"' in bytes(frames[at + 5].buffer[:4096]):
                self.cells.ended(_parent_id(frames, at))
        elif channel == "iopub" and b'"execute_input"' in header:
            content = json.loads(bytes(frames[at + 5].buffer))
            self.cells.started(_parent_id(frames, at), int(content["execution_count"]))
        elif (
            channel == "iopub" and b'"status"' in header and b'"idle"' in bytes(frames[at + 5].buffer[:4096])
        ):
            self.cells.ended(_parent_id(frames, at))

    def _execute_request(self, frames: list[Any], at: int, header: dict[str, Any]) -> None:
        metadata = json.loads(bytes(frames[at + 4].buffer))
        ours = metadata.get("jupyter_glovebox")
        index = ours.get("cell_index") if isinstance(ours, dict) else None
        cell_id = metadata.get("cellId")
        self.cells.requested(
            [f.bytes for f in frames[:at]],
            header,
            index if isinstance(index, int) else None,
            escape(cell_id)[:64] if isinstance(cell_id, str) and cell_id else None,
        )

    # -- the end --------------------------------------------------------------------------------

    def announce_end(self, name: str, text: str) -> None:
        """Tell the client whose cell runs that a budget ended the kernel. Waits until it is sent."""
        if self._thread is None or not self.ready.is_set() or not self._thread.is_alive():
            return
        self._announcement = (name, text)
        os.write(self._stop_write, b"a")
        self._announced.wait(2.0)

    def _announce(self, name: str, text: str) -> None:
        if (request := self.cells.running) is None:
            return
        identities, parent, cell = request
        count = cell.execution_count
        error = {"ename": "GloveboxBudget", "evalue": text, "traceback": [f"GloveboxBudget ({name}): {text}"]}
        self._say("iopub", [b"stream"], parent, "stream", {"name": "stderr", "text": f"Glovebox: {text}\n"})
        self._say("iopub", [b"error"], parent, "error", error)
        reply = error | {"status": "error", "execution_count": count}
        self._say("shell", identities, parent, "execute_reply", reply)
        self._say("iopub", [b"status"], parent, "status", {"execution_state": "idle"})

    def _say(
        self, channel: str, prefix: list[bytes], parent: dict[str, Any], kind: str, content: dict[str, Any]
    ) -> None:
        header = {
            "msg_id": uuid.uuid4().hex, "msg_type": kind, "username": "glovebox", "version": "5.3",
            "session": parent.get("session", ""), "date": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime()),
        }  # fmt: skip
        parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
        signature = hmac.new(self._outer_key, b"".join(parts), hashlib.sha256).hexdigest().encode()
        self._outer_sockets[channel].send_multipart([*prefix, _DELIMITER, signature, *parts], zmq.NOBLOCK)

    def stop(self) -> CleanupStep:
        """Stop the thread, close everything, remove the endpoints and see them gone."""
        self._stopping = True
        os.write(self._stop_write, b"s")
        if self._thread is not None:
            self._thread.join(5.0)
            if self._thread.is_alive():
                return CleanupStep(verified=False, detail="the relay's thread did not end")
        for socket in (*self._outer_sockets.values(), *self._inner_sockets.values()):
            socket.close()
        self._context.term()
        for fd in (*self._fds, self._stop_read, self._stop_write):
            os.close(fd)
        self._fds.clear()
        left = [path for channel in _INNER if os.path.lexists(path := self._path(channel))]
        for path in left:
            os.unlink(path)
        left = [path for path in left if os.path.lexists(path)]
        if left:
            return CleanupStep(verified=False, detail=f"endpoints left: {', '.join(left)}")
        return CleanupStep(verified=True, detail="five endpoints closed and removed")


def _parent_id(frames: list[Any], at: int) -> str:
    return str(json.loads(bytes(frames[at + 3].buffer)).get("msg_id"))

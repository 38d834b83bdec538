"""The manager's side of a supervisor: start one, follow what it says, tell it what to do.

Used by the provisioner (awaiting) and by the command line (blocking). Sources: posix_spawn(3),
pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import CannotIsolateError, GloveboxError, RefusedError
from ..sandbox.base import SandboxError
from .channel import CONTROL_FD, Channel, Lines, read_available
from .spec import Closed, Command, Ended, Failed, FromSupervisor, Launched, LaunchSpec, Notice

_BOOTSTRAP = "from jupyter_glovebox.supervisor.main import main; main()"
_STDIO_FDS = (4, 5, 6)
_KEPT_VARIABLES = (
    "HOME", "PATH", "LANG", "LC_ALL", "TZ", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME",
    "DBUS_SESSION_BUS_ADDRESS", "JUPYTER_GLOVEBOX_STATE_DIR", "JUPYTER_GLOVEBOX_RUNTIME_DIR",
    "JUPYTER_GLOVEBOX_CONFIG_DIR",
)  # fmt: skip

_decoder = msgspec.json.Decoder(FromSupervisor)


def _import_path() -> list[str]:
    """The folders that hold this package and what it needs: the child starts without site (`-I -S`)."""
    import msgspec as msgspec_module
    import zmq

    folders: list[str] = []
    for module in (sys.modules[__package__.partition(".")[0]], msgspec_module, zmq):
        if module.__file__ and (folder := str(Path(module.__file__).parent.parent)) not in folders:
            folders.append(folder)
    return folders


def _release(fd: int, pid: int) -> None:
    """Closing the control socket makes the supervisor destroy the sandbox; then it is reaped."""
    with contextlib.suppress(OSError):
        os.close(fd)
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        # A finalizer must not wait; the thread ends with the supervisor, which ends by itself.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=_reap, args=(pid,), daemon=True).start()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


class SupervisorProcess:
    """A running supervisor, as its manager sees it.

    Attributes:
        pid: the supervisor's process id.
        launched, failed, ended, closed: the messages of that name, once they have come.
        gone: the supervisor's end of the control socket is closed.
        on_notice: called with each event as it arrives.
    """

    def __init__(self, pid: int, control_fd: int) -> None:
        self.pid = pid
        self._channel = Channel(control_fd)
        self._lines = Lines()
        self.launched: Launched | None = None
        self.failed: Failed | None = None
        self.ended: Ended | None = None
        self.closed: Closed | None = None
        self.gone = False
        self.on_notice: Callable[[Notice], None] | None = None
        # Not a socket object and not a Popen: both warn when they are dropped, and dropping a manager
        # is a usual way to end a kernel.
        self._finalizer = weakref.finalize(self, _release, control_fd, pid)

    @classmethod
    def start(cls, spec: LaunchSpec, *, stderr: int | None = None) -> SupervisorProcess:
        """Start a supervisor for `spec`.

        Args:
            spec: what to launch; its `stdio` names descriptors of this process.
            stderr: descriptor for what the kernel prints outside its messages; default: our own.

        Raises:
            OSError: no process could be made.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # dup2 onto itself would keep close-on-exec, and a later dup2 must not overwrite a source.
            sources = [theirs.fileno(), *(spec.stdio or ())]
            high = [os.dup(fd) if fd > 9 else _dup_above(fd, 10) for fd in sources]
            try:
                actions: list[tuple[object, ...]] = [
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                ]
                if stderr is not None and stderr != 2:
                    actions.append((os.POSIX_SPAWN_DUP2, stderr, 2))
                actions += [
                    (os.POSIX_SPAWN_DUP2, fd, target)
                    for fd, target in zip(high, (CONTROL_FD, *_STDIO_FDS), strict=False)
                ]
                # msgspec takes typing_extensions only where `typing` lacks something; importing it costs a
                # tenth of the supervisor's start.
                code = (
                    f"import sys; sys.path[:0] = {_import_path()!r}; "
                    "sys.modules['typing_extensions'] = None\n"
                ) + _BOOTSTRAP
                env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
                pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-I", "-S", "-c", code],
                    env,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD),
                )
            finally:
                for fd in high:
                    os.close(fd)
        ours.setblocking(False)
        process = cls(pid, ours.detach())
        told = msgspec.structs.replace(spec, stdio=_STDIO_FDS if spec.stdio else None)
        process._channel.send(told)
        return process

    def fileno(self) -> int:
        """The control socket, for select."""
        return self._channel.fd

    def send(self, command: Command) -> None:
        """Tell the supervisor something; a supervisor that has gone is not an error."""
        self._channel.send(command)

    def pump(self) -> None:
        """Take in everything the supervisor has said, without waiting."""
        if self.gone or not self._finalizer.alive:
            self.gone = True
            return
        data, self.gone = read_available(self._channel.fd)
        for line in self._lines.feed(data):
            self._take(_decoder.decode(line))

    def _take(self, message: FromSupervisor) -> None:
        if isinstance(message, Launched):
            self.launched = message
        elif isinstance(message, Failed):
            self.failed = message
        elif isinstance(message, Ended):
            self.ended = message
        elif isinstance(message, Closed):
            self.closed = message
        elif self.on_notice is not None:
            self.on_notice(message)

    @property
    def started(self) -> bool:
        """Whether the start has come to its end, good or bad."""
        return bool(self.launched or self.failed or self.ended or self.gone)

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Take in messages until `done()` or the time (seconds) is over; the value of `done()`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.pump()
            if done() or self.gone:
                return done()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            select.select([self.fileno()], [], [], left)

    async def wait_async(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """As `wait`, on the running event loop, whichever that is this time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.pump()
            if done() or self.gone:
                return done()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            await _readable(self.fileno(), left)

    def reap(self) -> None:
        """Close our end and collect the supervisor's exit; it may still be on its way out."""
        self._finalizer()

    def kill(self) -> None:
        """SIGKILL the supervisor; its sandbox goes with it."""
        if self._finalizer.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def raise_failure(self) -> None:
        """Raise what a `Failed` message, or a supervisor that died during the start, means.

        Raises:
            FileNotFoundError, PermissionError: as subprocess.Popen would for argv[0].
            RefusedError: a rule refuses the launch.
            SandboxError: the sandbox could not be built.
            GloveboxError: anything else.
        """
        failed = self.failed
        if failed is None:
            raise CannotIsolateError(
                "The kernel's supervisor ended before the sandbox was built.",
                "Its last words are on the standard error of this process.",
            )
        if failed.kind == "not-found":
            raise FileNotFoundError(2, "No such file or directory", failed.message)
        if failed.kind == "permission":
            raise PermissionError(13, "Permission denied", failed.message)
        if failed.kind == "cannot-isolate":
            raise SandboxError(failed.stage, failed.message, failed.remedy)
        if failed.kind == "refused":
            raise RefusedError(failed.message, failed.remedy)
        raise GloveboxError(failed.message, failed.remedy)


def _dup_above(fd: int, lowest: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)


async def _readable(fd: int, timeout: float | None) -> None:
    """Wait until `fd` can be read, at most `timeout` seconds."""
    import asyncio  # not at the top: the command line never needs it

    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    try:
        loop.add_reader(fd, event.set)
    except NotImplementedError:  # a loop without add_reader
        await asyncio.sleep(0.005)
        return
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except (TimeoutError, asyncio.TimeoutError):
        pass
    finally:
        loop.remove_reader(fd)

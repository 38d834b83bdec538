"""The inner stage: the first program inside the sandbox. It locks the door and becomes the command.

It holds no policy and no secret. The supervisor sends, over a socket pair, what it has worked out; the
stage puts it in force (limits, Landlock, the notify filter), hands out the filter's listener, waits for
the word, closes everything else and executes the command. It is run by its path, alone and isolated
(`python -I -S -E stage.py FD`), so it imports only what starts fast and nothing of this package.

Messages, stage to supervisor: `H` hello (the kernel adds our pid), `R` ready (with the listener and one
byte, the errno of the search for the command), `E` marshalled (step, errno, text), `X` errno of the exec.
Supervisor to stage: 8 bytes length with the command's three streams, a marshalled dict; later `G`.

Sources: seccomp(2), landlock(7), unix(7), execve(2), close_range(2).
"""

import _signal  # type: ignore[import-not-found]  # `signal` would import enum
import _socket
import array
import ctypes
import marshal
import os
import resource
import sys

TYPE_CHECKING = False  # `typing` itself would cost milliseconds here
if TYPE_CHECKING:
    from typing import Any

_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SYS_CLOSE_RANGE = 436
_SYS_LANDLOCK = 444  # create_ruleset; add_rule and restrict_self follow
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8
_WAIT_KILLABLE_RECV = 32
_TIOCSCTTY = 0x540E
_ENOENT, _EACCES, _EINVAL = 2, 13, 22
_NULL_DEVICE = os.makedev(1, 3)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _syscall(number: int, *args: object) -> int:
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *plain))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def receive(sock: "_socket.socket") -> "tuple[dict[str, Any], list[int]]":
    """The supervisor's message and the descriptors that came with it."""
    head, control, _, _ = sock.recvmsg(8, _socket.CMSG_SPACE(12))
    fds = array.array("i")
    for level, kind, data in control:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    left = int.from_bytes(head, "little")
    parts = []
    while left:
        part = sock.recv(min(left, 1 << 16))
        if not part:
            os._exit(1)
        parts.append(part)
        left -= len(part)
    return marshal.loads(b"".join(parts)), list(fds)  # noqa: S302 - from the supervisor alone


def landlock(abi: int, handled_fs: int, scoped: int, rules: "list[tuple[bytes, int]]") -> None:
    """Put the rules in force for this process and all that come from it. Raises OSError."""
    attributes = (ctypes.c_uint64 * 3)(handled_fs, 0, scoped)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _syscall(_SYS_LANDLOCK, ctypes.byref(attributes), size, 0)
    for path, access in rules:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # struct landlock_path_beneath_attr is packed: u64 allowed_access, s32 parent_fd.
        rule = access.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        _syscall(_SYS_LANDLOCK + 1, ruleset, 1, ctypes.c_char_p(rule), 0)
        os.close(fd)
    _syscall(_SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)


def check_landlock(folder: bytes) -> None:
    """Try what the rules forbid and the kernel else allows: a whiteout node. Raises OSError if it works."""
    probe = folder + b"/.check"
    try:
        os.mknod(probe, 0o020600, 0)
    except PermissionError:
        return
    os.unlink(probe)
    raise OSError(0, "the rules have no effect")


def notify(program: bytes) -> int:
    """Install the notify filter (struct sock_filter array); its listener. Raises OSError."""
    text = ctypes.create_string_buffer(program, len(program))

    class Fprog(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    fprog = Fprog(len(program) // 8, ctypes.addressof(text))
    number = _SYS_SECCOMP[os.uname().machine]
    try:
        return _syscall(number, _SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE_RECV, ctypes.byref(fprog))
    except OSError as error:
        if error.errno != _EINVAL:  # before Linux 5.19
            raise
        return _syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(fprog))


def find(name: bytes, path: bytes) -> "tuple[bytes, int]":
    """The command's file and 0, or the errno that says why there is none (as execvp(3) would)."""
    if b"/" in name:
        return name, 0
    error = _ENOENT
    for folder in path.split(b":"):
        candidate = (folder or b".") + b"/" + name
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate, 0
            error = _EACCES
    return name, error


def streams(fds: "list[int]", terminal: bool) -> None:
    """Make the given descriptors 0, 1 and 2, and the terminal the controlling one."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target, inheritable=True)
        info = os.fstat(fd)
        if info.st_rdev == _NULL_DEVICE and info.st_mode & 0o170000 == 0o020000:
            # The host's node would be ours to chmod when root started us; the one inside is read-only.
            inner = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            os.dup2(inner, target, inheritable=True)
            os.close(inner)
    os.setsid()
    if terminal and _libc.ioctl(0, ctypes.c_ulong(_TIOCSCTTY), 0) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def signals() -> None:
    """Every signal as a new program expects it: default, and not blocked."""
    for number in _signal.valid_signals():
        if number not in (_signal.SIGKILL, _signal.SIGSTOP) and _signal.getsignal(number) is not None:
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def prepare(config: "dict[str, Any]", fds: "list[int]", own: int) -> "tuple[bytes, int, int]":
    """Everything but the exec. Returns file, errno of the search, listener; raises (step, OSError)."""
    step = "process"
    try:
        with open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write(str(config["oom"]))
    except PermissionError:
        pass  # it already is higher, and may not be lowered
    try:
        os.chdir(config["cwd"])
        file, missing = find(config["argv"][0], config["path"])
        if config["landlock"] is not None:
            step = "landlock"
            landlock(*config["landlock"])
            check_landlock(config["probe"])
        step = "streams"
        streams(fds, config["terminal"])
        step = "descriptors"
        _syscall(_SYS_CLOSE_RANGE, 3, own - 1, 0)
        _syscall(_SYS_CLOSE_RANGE, own + 1, 0xFFFFFFFF, 0)
        step = "limits"
        for number, soft, hard in config["limits"]:
            resource.setrlimit(number, (soft, hard))
        signals()
        step = "seccomp"
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), "no_new_privs")
        # From here on nothing may be opened: the listener is not served yet.
        return file, missing, notify(config["filter"])
    except OSError as error:
        raise StageError(step, error) from error


class StageError(Exception):
    """A step of the preparation failed."""


def main(fd: int) -> None:
    """Serve the supervisor on socket `fd`; never returns."""
    os.set_inheritable(fd, False)
    sock = _socket.socket(fileno=fd)
    os.write(fd, b"H")
    config, fds = receive(sock)
    try:
        file, missing, listener = prepare(config, fds, fd)
    except StageError as failure:
        step, error = failure.args
        os.write(fd, b"E" + marshal.dumps((step, error.errno or 0, str(error)), 2))
        os._exit(1)
    sock.sendmsg(
        [b"R" + bytes((missing,))],
        [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [listener]))],
    )
    os.close(listener)
    if os.read(fd, 1) != b"G" or missing:
        os._exit(1)
    try:
        os.execve(file, config["argv"], config["env"])  # noqa: S606 - this is the program's purpose
    except OSError as error:
        os.write(fd, b"X" + bytes((error.errno or 0,)))
    os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]))

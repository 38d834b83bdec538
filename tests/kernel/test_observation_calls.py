"""The listener and the observer on real watched calls of a program, without a sandbox around it.

A program installs the notify filter on itself, hands out the listener, and makes its calls. An empty
folder stands for the sandbox's root, so whatever exists on this machine is hidden.
"""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_glovebox.ledger.events import Event
from jupyter_glovebox.manifest.plan import Budgets, Plan, Scratch
from jupyter_glovebox.sandbox import seccomp
from jupyter_glovebox.sandbox.base import Mounted
from jupyter_glovebox.supervisor.observation import Observer

PRELUDE = """
import array, ctypes, errno, mmap, os, signal, socket, sys, threading, time
from jupyter_glovebox.sandbox.stage import notify
ours = socket.socket(fileno=int(sys.argv[1]))
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
OPENAT = {"x86_64": 257, "aarch64": 56}[os.uname().machine]
def openat(pointer, flags=0, folder=-100):
    fd = libc.syscall(OPENAT, folder, ctypes.c_void_p(pointer), flags, 0)
    if fd >= 0:
        os.close(fd)
        return "ok"
    return errno.errorcode[ctypes.get_errno()]
def told(path, **more):
    raw = ctypes.create_string_buffer(path)
    return openat(ctypes.addressof(raw), **more)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
libc.prctl(38, 1, 0, 0, 0)
program = ours.recv(1 << 16)
fd = notify(program)
ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
os.close(fd)
ours.recv(1)
ours.close()
"""


class Watched:
    """A program under the filter, and the observer that serves it."""

    def __init__(self, base: Path, code: str, sink: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        root = base / "root"
        (root / "own").mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        theirs.close()
        ours.sendall(seccomp.notify_filter())
        _, control, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
        self.listener = array.array("i", control[0][2])[0]
        self.root_fd = os.open(root, os.O_PATH)
        plan = Plan(
            name="t", baseline=True, notebook=None, workdir="/own", isolation="bubblewrap",
            workload="generated-code", scratch=Scratch(size=1), outputs=None, policy="sha256:0",
            budgets=Budgets(memory=1, cpus=1, cpu_time=1, wall_time=1, processes=1, open_files=1, display=1),
        )  # fmt: skip
        mounts = [Mounted(target="/own", writable=True)]
        mounts += [
            Mounted(target=os.path.realpath(p), writable=False, source=os.path.realpath(p))
            for p in {"/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix} if os.path.isdir(p)
        ]  # fmt: skip
        self.observer = Observer(
            self.listener, root_fd=self.root_fd, mounts=tuple(mounts), plan=plan, kernel_id="k",
            current_cell=lambda: None, sink=sink or self.events.append, homes=("/home/someone",),
        )  # fmt: skip
        self.observer.start()
        ours.sendall(b"g")
        ours.close()

    def lines(self, patience: float = 60) -> list[str]:
        out, _ = self.process.communicate(timeout=patience)
        self.observer.stop()
        assert self.process.returncode == 0, out
        return str(out).splitlines()


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    started: list[Watched] = []

    def _watch(code: str, sink: Callable[[Event], None] | None = None) -> Watched:
        started.append(Watched(tmp_path, code, sink))
        return started[-1]

    yield _watch
    for watched in started:
        watched.process.kill()
        watched.process.wait()
        if watched.process.stdout:
            watched.process.stdout.close()
        watched.observer.stop()
        os.close(watched.root_fd)
        os.close(watched.listener)


@contextmanager
def hidden(folder: Path, name: bytes = b"secret") -> Iterator[bytes]:
    """A file that exists on this machine and not in the root."""
    raw = os.fsencode(folder) + b"/" + name
    os.close(os.open(raw, os.O_CREAT | os.O_WRONLY))
    yield raw


def test_pointers_and_lengths(watch: Watch, tmp_path: Path) -> None:
    """What cannot be read as a path gets what the kernel says, and no event."""
    with hidden(tmp_path) as raw:
        folder = os.fsencode(tmp_path)
        exact = folder + b"/" * (4095 - len(raw) + 1) + b"secret"
        assert len(exact) == 4095
        os.close(os.open(exact, os.O_RDONLY))  # the kernel takes 4095 bytes
        watched = watch(f"""
raw = {raw!r}
say(openat(0), openat(1), openat(1 << 62), openat((1 << 64) - 1))
area = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
libc.munmap(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE)
edge = start + mmap.PAGESIZE
ctypes.memmove(edge - len(raw) - 1, raw + b"\\0", len(raw) + 1)
say(openat(edge - len(raw) - 1))
ctypes.memmove(edge - len(raw), raw, len(raw))
say(openat(edge - len(raw)))
say(told({exact!r}), told({exact!r} + b"x"), told(b""))
os._exit(0)
""")
        assert watched.lines() == [
            "EFAULT EFAULT EFAULT EFAULT",
            "EACCES",
            "EFAULT",
            "EACCES ENAMETOOLONG ENOENT",
        ]
    assert {e.target for e in watched.events} == {f"{tmp_path}/secret"}
    assert all(e.event_class == "not-granted" for e in watched.events)


def test_long_detours_are_not_taken_for_installed_files(watch: Watch, tmp_path: Path) -> None:
    """A name that begins in /usr and leaves it behind what one look covers."""
    with hidden(tmp_path) as raw:
        for detour in (b"/usr" + b"/" * 300 + b"..", b"/usr/" + b"./" * 200 + b"..", b"/usr/lib/../.."):
            os.close(os.open(detour + raw, os.O_RDONLY))
        watched = watch(f"""
for detour in (b"/usr" + b"/" * 300 + b"..", b"/usr/" + b"./" * 200 + b"..", b"/usr/lib/../.."):
    say(told(detour + {raw!r}), told(b"/usr/bin/env"))
os._exit(0)
""")
        assert watched.lines() == ["EACCES ok"] * 3
    assert sum(e.count for e in watched.events) == 3
    assert {e.target for e in watched.events} == {f"{tmp_path}/secret"}


def test_names_that_are_no_text(watch: Watch, tmp_path: Path) -> None:
    name = b"a\xff\n\x1b[31m\xe2\x80\xae.csv"
    with hidden(tmp_path, name) as raw:
        watched = watch(f"say(told({raw!r}))\nos._exit(0)")
        assert watched.lines() == ["EACCES"]
    (event,) = watched.events
    assert event.target == f"{tmp_path}/a\\xff\\x0a\\x1b[31m\\u202e.csv"
    assert event.process
    assert event.process.pid == watched.process.pid
    assert event.process.cmdline.isprintable()


def test_folders_of_descriptors_and_of_threads(watch: Watch, tmp_path: Path) -> None:
    with hidden(tmp_path) as raw:
        watched = watch(f"""
folder = os.open("/", os.O_PATH)
say(told({raw[1:]!r}, folder=folder), told({raw[1:]!r}, folder=folder | 1 << 40), told({raw!r}, folder=12345))
os.chdir("/")
said = []
def work():
    said.append(told({raw[1:]!r}))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
say(*said)
if os.fork() == 0:
    say(told({raw!r}))
    os._exit(0)
os.wait()
os._exit(0)
""")
        assert watched.lines() == ["EACCES EACCES EACCES", " ".join(["EACCES"] * 8), "EACCES"]
    assert sum(e.count for e in watched.events) == 12
    assert {e.target for e in watched.events} == {f"{tmp_path}/secret"}


def test_a_storm_of_different_names_is_bounded(watch: Watch, tmp_path: Path) -> None:
    """Every denied call is counted; not every one may cost the ledger a line, and keys stay visible."""
    for number in range(5000):
        (tmp_path / f"f{number}").touch()
    watched = watch(f"""
for number in range(5000):
    assert told(b"{tmp_path}/f%d" % number) == "EACCES"
say(told(b"/home/someone/.ssh/id_rsa"))
os._exit(0)
""")
    assert watched.lines() == ["ENOENT"]
    by_class = Counter[str]()
    for event in watched.events:
        by_class[event.event_class] += event.count
    assert by_class == {"not-granted": by_class["not-granted"], "observation": 5001 - by_class["not-granted"]}
    assert 1000 <= len(watched.events) < 1500
    assert [e.target for e in watched.events if e.sensitive] == ["/home/someone/.ssh/id_rsa"]
    assert all(e.severity == "high" for e in watched.events if e.sensitive)


def test_answers_never_wait_for_the_ledger(watch: Watch, tmp_path: Path) -> None:
    stuck = threading.Event()
    seen: list[Event] = []

    def sink(event: Event) -> None:
        stuck.wait(30)
        seen.append(event)

    with hidden(tmp_path) as raw:
        watched = watch(f"say(*[told({raw!r}) for _ in range(300)])\nos._exit(0)", sink)
        out, _ = watched.process.communicate(timeout=20)  # while the ledger is stuck
        assert out.split() == ["EACCES"] * 300
        stuck.set()
        watched.observer.stop()
    assert sum(e.count for e in seen) == 300


def test_a_ledger_that_fails_is_said(watch: Watch, tmp_path: Path) -> None:
    seen: list[Event] = []

    def sink(event: Event) -> None:
        if event.event_class != "observation":
            raise ValueError("no room")
        seen.append(event)

    with hidden(tmp_path) as raw:
        watched = watch(f"say(told({raw!r}), told({raw!r}))\nos._exit(0)", sink)
        assert watched.lines() == ["EACCES EACCES"]
    assert sum(e.count for e in seen) == 2
    state = watched.observer.state()
    assert state.state == "soft"
    assert "no room" in state.reason


def test_when_answering_fails_calls_fail_closed(watch: Watch, tmp_path: Path) -> None:
    """Whatever happens to the answering thread: nothing opens, nothing hangs, and it is said."""
    with hidden(tmp_path) as raw:
        watched = watch(f"""
say(told({raw!r}), told(b"/usr/bin/env"))
sys.stdin.read(1)
say(told({raw!r}), told(b"/usr/bin/env"))
os._exit(0)
""".replace("sys.stdin.read(1)", "time.sleep(1.5)"))  # fmt: skip

        def broken(*_: object) -> None:
            raise RuntimeError("surprise")

        deadline = time.monotonic() + 20
        while not watched.events and time.monotonic() < deadline:
            time.sleep(0.01)
        watched.observer._answer = broken  # type: ignore[method-assign]
        assert watched.lines() == ["EACCES ok", "ENOSYS ENOSYS"]
    assert watched.observer.state().state == "soft"
    assert [e.event_class for e in watched.events] == ["not-granted", "observation"]
    assert "surprise" in watched.events[1].target


@pytest.mark.parametrize("restarts", [True, False])
def test_a_storm_of_signals(restarts: bool, watch: Watch, tmp_path: Path) -> None:
    """2000 signals a second, against opens that are denied and that pass.

    A signal that comes before the supervisor has taken the call makes the kernel begin it again if the
    handler has SA_RESTART, and else end it with EINTR (seccomp_unotify(2)). No other answer ever changes.
    """
    with hidden(tmp_path) as raw:
        watched = watch(f"""
hits = 0
def handler(*_):
    global hits
    hits += 1
signal.signal(signal.SIGALRM, handler)
signal.siginterrupt(signal.SIGALRM, {not restarts})
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
denied = {{told({raw!r}) for _ in range(3000)}}
passed = {{told(b"/usr/bin/env") for _ in range(3000)}}
python = {{open("/usr/bin/env").close() for _ in range(2000)}}  # repeats by itself: PEP 475
signal.setitimer(signal.ITIMER_REAL, 0)
say(*sorted(denied - {{"EINTR"}}), *sorted(passed - {{"EINTR"}}), *python, hits > 20)
say("EINTR" in denied | passed)
os._exit(0)
""")
        first, interrupted = watched.lines()
    assert first == "EACCES ok None True"
    if restarts:
        assert interrupted == "False"


def test_the_end_of_the_last_program_ends_the_observer(watch: Watch) -> None:
    watched = watch("os._exit(0)")
    watched.process.wait()
    started = time.monotonic()
    watched.observer.stop()
    assert time.monotonic() - started < 3
    assert watched.observer.state().state == "enforced"
    assert watched.events == []


def test_connect_is_done_on_a_copy(watch: Watch, tmp_path: Path) -> None:
    """Own sockets work, with the errno that connect(2) would give; a host's are refused, by any name."""
    own = tmp_path / "root/own"
    own.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as inner, socket.socket(socket.AF_UNIX) as outer, \
            socket.create_server(("127.0.0.1", 0)) as tcp:  # fmt: skip
        inner.bind(str(own / "s"))
        inner.listen()
        outer.bind(str(tmp_path / "host.sock"))
        outer.listen()
        (own / "file").touch()
        (own / "link").symlink_to("s")
        (own / "out").symlink_to(tmp_path / "host.sock")
        watched = watch(f"""
def connect(address, family=socket.AF_UNIX, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as s:
        code = s.connect_ex(address)
    return errno.errorcode.get(code, "ok")
say(connect("/own/s"), connect("/own/link"), connect("/own/file"), connect("/own/absent"))
say(connect({str(tmp_path / "host.sock")!r}), connect("/own/out"), connect("\\0absent"))
say(connect(("127.0.0.1", {tcp.getsockname()[1]}), socket.AF_INET), connect(("127.0.0.1", 1), socket.AF_INET))
s = socket.socket(socket.AF_INET); s.setblocking(False)
say(errno.errorcode.get(s.connect_ex(("127.0.0.1", 1)), "ok"))
CONNECT = {{"x86_64": 42, "aarch64": 203}}[os.uname().machine]
raw = b"\\x01\\0/own/s\\0"
def bare(fd, address, length):
    return errno.errorcode.get(ctypes.get_errno(), "?") if libc.syscall(CONNECT, fd, address, length) < 0 else "ok"
f = os.open("/usr", os.O_RDONLY)
s = socket.socket(socket.AF_INET)
say(bare(f, raw, 9), bare(999, raw, 9), bare(s.fileno(), raw, 9), bare(s.fileno(), ctypes.c_void_p(8), 9),
    bare(s.fileno(), raw, 4096))
os._exit(0)
""")
        assert watched.lines() == [
            "ok ok ECONNREFUSED ENOENT", "EACCES EACCES ECONNREFUSED", "ok ECONNREFUSED", "EINPROGRESS",
            "ENOTSOCK EBADF EAFNOSUPPORT EFAULT EINVAL",
        ]  # fmt: skip
    assert {(e.operation, e.target) for e in watched.events} == {("connect", f"{tmp_path}/host.sock")}

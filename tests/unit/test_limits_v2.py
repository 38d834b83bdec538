"""cgroup v2 on a folder tree that behaves like cgroupfs: what real machines lack, refuse or hide."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox import limits
from jupyter_glovebox.limits import files, groups, v2
from jupyter_glovebox.limits.base import Limiter, LimitValues
from jupyter_glovebox.limits.host import Host

VALUES = LimitValues(
    memory=3 << 30, memory_budget=2 << 30, cpus=1.5, cpu_time=60, wall_time=60, processes=100, open_files=64
)
_FILES = {
    "memory": ("memory.max", "memory.swap.max", "memory.oom.group", "memory.current", "memory.peak", "memory.events"),
    "pids": ("pids.max", "pids.current", "pids.events"),
    "cpu": ("cpu.max",),
    "cpuset": ("cpuset.cpus",),
}  # fmt: skip


class Tree:
    """An imitation of cgroupfs, with the rules that matter: files appear with a group, a group with
    processes gives no controllers to children, rmdir takes a group's files with it."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.root, self.proc, self.run = base / "cgroup", base / "proc", base / "run"
        self.without: set[str] = set()
        self.refuse: dict[str, int] = {}
        self.stubborn = False
        for folder in (self.root, self.proc / "self", self.run):
            folder.mkdir(parents=True)
        self._mkdir, self._write = os.mkdir, files.write
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(v2, "write", self.write)
        monkeypatch.setattr(v2, "remove_group", shutil.rmtree)
        monkeypatch.setattr(groups, "remove_group", shutil.rmtree)
        self.fill(self.root, ())
        (self.root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")

    def mkdir(self, path: Any, *rest: Any, **more: Any) -> None:
        self._mkdir(path, *rest, **more)
        if self.root in Path(path).parents:
            self.fill(Path(path), (Path(path).parent / "cgroup.subtree_control").read_text().split())

    def fill(self, path: Path, controllers: Any) -> None:
        names = {"cgroup.procs", "cgroup.subtree_control", "cgroup.kill"}
        names.update(*(_FILES[controller] for controller in controllers if controller in _FILES))
        for name in names - self.without:
            (path / name).write_text("")
        (path / "cgroup.controllers").write_text(" ".join(controllers))
        (path / "cgroup.events").write_text("populated 0\nfrozen 0\n")
        (path / "cpu.stat").write_text("usage_usec 1500000\n")
        if path != self.root:
            (path / "cgroup.type").write_text("domain\n")

    def write(self, path: Path, text: str) -> None:
        if path.name in self.refuse:
            raise OSError(self.refuse[path.name], os.strerror(self.refuse[path.name]), str(path))
        if path.name == "cgroup.subtree_control":
            if (path.parent / "cgroup.procs").read_text().split() and path.parent != self.root:
                raise OSError(errno.EBUSY, "Device or resource busy", str(path))
            path.write_text(f"{path.read_text()} {text[1:]}")
        elif path.name == "cgroup.procs":
            source = path.parent.parent / "cgroup.procs"
            if not self.stubborn:
                source.write_text("\n".join(p for p in source.read_text().split() if p != text))
            path.write_text(f"{path.read_text()}{text}\n")
        else:
            self._write(path, text)

    def stand(self, path: str, controllers: str = "cpuset cpu memory pids") -> Path:
        """Our own group, with this process in it."""
        group = self.root / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.controllers").write_text(controllers)
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n77\n")
        (self.proc / "self/cgroup").write_text(f"1:name=systemd:/x\n0::/{path}\n")
        return group

    def choose(self, name: str = "k1") -> Limiter:
        return limits.choose(VALUES, name, root=self.root, proc=self.proc, run=self.run)

    def host(self, uid: int) -> Host:
        return Host(self.root, self.proc, self.run, uid)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_a_group_of_our_own_gets_every_limit(tree: Tree) -> None:
    group = tree.stand("box")
    limiter = tree.choose()
    leaf = group / "glovebox-k1"
    assert limiter.kind == "cgroup-v2-delegated"
    found = {
        name: (leaf / name).read_text()
        for name in ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max")
    }
    assert found == {
        "memory.max": str(3 << 30), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "100",
        "cpu.max": "150000 100000",
    }  # fmt: skip
    assert len((leaf / "cpuset.cpus").read_text().split(",")) == min(2, len(os.sched_getaffinity(0)))
    assert (group / "cgroup.procs").read_text() == ""
    assert (group / "glovebox-host/cgroup.procs").read_text().split() == [str(os.getpid()), "77"]
    assert {state.state for state in limiter.states().values()} == {"enforced"}
    assert limits.refuse_reason(limiter) is None
    assert limiter.destroy().verified
    assert not leaf.exists()


def test_the_next_kernel_stands_beside(tree: Tree) -> None:
    group = tree.stand("box")
    first = tree.choose("k1")
    (tree.proc / "self/cgroup").write_text("0::/box/glovebox-host\n")
    second = tree.choose("k2")
    assert {entry.name for entry in group.iterdir() if entry.is_dir()} == {
        "glovebox-host", "glovebox-k1", "glovebox-k2",
    }  # fmt: skip
    assert first.destroy().verified
    assert (group / "glovebox-k2").exists()
    assert second.destroy().verified


def test_memory_without_pids_is_shown(tree: Tree) -> None:
    tree.stand("box", "memory cpu")
    limiter = tree.choose()
    states = limiter.states()
    assert limiter.kind == "cgroup-v2-delegated"
    assert states["memory"].state == "enforced"
    assert states["processes"].state == "soft"
    assert "pids is not passed on" in states["processes"].reason
    assert "Delegate=" in states["processes"].fix
    refusal = limits.refuse_reason(limiter)
    assert refusal is not None
    assert "processes" in refusal
    assert limiter.destroy().verified


def test_neither_memory_nor_pids_is_polled_with_the_fix(tree: Tree) -> None:
    group = tree.stand("box", "cpu io")
    limiter = tree.choose()
    assert limiter.kind == "rlimit"
    assert "memory and pids" in limiter.states()["memory"].reason
    assert "Delegate=" in limiter.states()["memory"].fix
    assert [entry.name for entry in group.iterdir() if entry.is_dir()] == []
    assert (group / "cgroup.procs").read_text().split() == [str(os.getpid()), "77"], "moved in vain"


@pytest.mark.parametrize("file", ["memory.max", "memory.oom.group", "pids.max", "cpu.max"])
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EACCES, errno.EINVAL])
def test_a_refused_limit_leaves_nothing_and_is_told(tree: Tree, file: str, code: int) -> None:
    group = tree.stand("box")
    tree.refuse[file] = code
    limiter = tree.choose()
    assert limiter.kind == "rlimit"
    assert file in limiter.states()["memory"].reason
    assert os.strerror(code) in limiter.states()["memory"].reason
    assert not (group / "glovebox-k1").exists()


def test_processes_that_cannot_be_moved(tree: Tree) -> None:
    tree.stand("box")
    tree.stubborn = True
    limiter = tree.choose()
    assert limiter.kind == "rlimit"
    assert not (tree.root / "box/glovebox-k1").exists()


def test_cpuset_that_refuses_leaves_affinity(tree: Tree) -> None:
    tree.stand("box")
    tree.refuse["cpuset.cpus"] = errno.EINVAL
    limiter = tree.choose()
    assert limiter.states()["cpus"].state == "enforced"
    assert limiter.destroy().verified


def test_no_swap_accounting_counts_only_where_swap_is_on(tree: Tree) -> None:
    tree.stand("box")
    tree.without.add("memory.swap.max")
    header = "Filename Type Size Used Priority\n"
    (tree.proc / "swaps").write_text(header)
    limiter = tree.choose()
    assert limiter.states()["memory"].state == "enforced"
    assert limiter.destroy().verified
    (tree.proc / "swaps").write_text(header + "/dev/sda2 partition 1 0 -2\n")
    limiter = tree.choose()
    assert limiter.states()["memory"].state == "soft"
    assert "swapoff" in limiter.states()["memory"].fix
    assert limiter.destroy().verified


def test_readings_without_the_newer_files(tree: Tree) -> None:
    """memory.peak came with Linux 5.19, pids.peak with 6.1: the highest reading stands in."""
    group = tree.stand("box")
    tree.without.add("memory.peak")
    limiter = tree.choose()
    leaf = group / "glovebox-k1"
    for memory, tasks in ((5000, 7), (900, 2)):
        (leaf / "memory.current").write_text(f"{memory}\n")
        (leaf / "pids.current").write_text(f"{tasks}\n")
        reading = limiter.reading()
    assert (reading.memory, reading.memory_peak, reading.tasks, reading.tasks_peak) == (900, 5000, 2, 7)
    assert reading.cpu_seconds == 1.5
    shutil.rmtree(leaf)
    assert limiter.reading().memory_peak == 5000
    assert limiter.check() is None
    assert limiter.destroy().verified


def test_the_budget_and_the_machine_are_told_apart(tree: Tree) -> None:
    group = tree.stand("box")
    limiter = tree.choose()
    leaf = group / "glovebox-k1"
    (leaf / "memory.peak").write_text(str(3 << 30))
    (leaf / "memory.events").write_text("low 0\nhigh 0\nmax 40\noom 1\noom_kill 3\noom_group_kill 1\n")
    breach = limiter.check()
    assert breach is not None
    assert breach.message == (
        "memory budget of 2.0 GiB (and 1.0 GiB for files in memory) reached: the kernel used 3.0 GiB"
    )
    assert limiter.destroy().verified
    limiter = tree.choose()
    (leaf / "memory.peak").write_text(str(1 << 30))
    (leaf / "memory.events").write_text("max 0\noom 0\noom_kill 1\n")
    breach = limiter.check()
    assert breach is not None
    assert breach.message.startswith("the machine ran out of memory")
    assert limiter.destroy().verified


def test_a_group_that_does_not_empty_is_not_verified(tree: Tree) -> None:
    group = tree.stand("box")
    limiter = tree.choose()
    leaf = group / "glovebox-k1"
    (leaf / "cgroup.events").write_text("populated 1\n")
    (leaf / "cgroup.procs").write_text("4242\n")
    step = limiter.destroy(timeout=0.15)
    assert not step.verified
    assert "4242" in step.detail
    assert (leaf / "cgroup.kill").read_text() == "1"
    (leaf / "cgroup.events").unlink()
    assert not limiter.destroy(timeout=0.15).verified, "an unreadable group was taken for an empty one"
    (leaf / "cgroup.events").write_text("populated 0\n")
    assert limiter.destroy().verified


@pytest.mark.parametrize("marked", [b"1", b"0", None])
def test_a_unit_is_used_only_when_systemd_delegated_it(tree: Tree, marked: bytes | None) -> None:
    unit = tree.stand("system.slice/jupyter.service")
    if marked is not None:
        os.setxattr(unit, "user.delegate", marked)
    limiter = tree.choose()
    # Unmarked, a unit's group is an ordinary user's only where systemd made it so; root's are all root's.
    usable = marked == b"1" or (marked is None and os.geteuid() != 0)
    assert limiter.kind == ("cgroup-v2-delegated" if usable else "rlimit")
    assert (unit / "cgroup.procs").read_text() == ("" if usable else f"{os.getpid()}\n77\n")
    assert limiter.destroy().verified


def test_a_unit_of_the_users_manager_is_not_taken_for_delegated(tree: Tree) -> None:
    tree.stand("user.slice/user@1000.service/app.slice/terminal.scope")
    with pytest.raises(v2.Unavailable, match="not delegated"):
        v2.delegated_group(tree.host(os.geteuid()))


@pytest.mark.parametrize("line", ["0::/../../other\n", "0::/gone\n", "4:memory:/x\n", ""])
def test_a_group_that_cannot_be_seen(tree: Tree, line: str) -> None:
    (tree.proc / "self/cgroup").write_text(line)
    limiter = tree.choose()
    assert limiter.kind == "rlimit"
    assert "not visible" in limiter.states()["memory"].reason


def test_a_living_group_of_that_name_is_not_shared(tree: Tree) -> None:
    group = tree.stand("box")
    first = tree.choose()
    (group / "glovebox-k1/cgroup.events").write_text("populated 1\n")
    assert tree.choose().kind == "rlimit"
    (group / "glovebox-k1/cgroup.events").write_text("populated 0\n")
    (group / "glovebox-k1/memory.peak").write_text("999")
    again = tree.choose()
    assert again.reading().memory_peak is None, "old counters were kept"
    assert again.destroy().verified
    assert first.destroy().verified


def test_sweep_finds_a_group_wherever_it_stands(tree: Tree) -> None:
    group = tree.stand("box")
    tree.choose("dead")
    tree.choose("other")
    (tree.proc / "self/cgroup").write_text("0::/elsewhere\n")
    step = limits.sweep("dead", root=tree.root, proc=tree.proc, run=tree.run)
    assert step.verified, step.detail
    assert not (group / "glovebox-dead").exists()
    assert (group / "glovebox-other").exists()

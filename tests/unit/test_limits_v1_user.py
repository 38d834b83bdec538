"""cgroup v1 for an ordinary user: folders an administrator made, as the doctor's fix says. Real groups."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import jupyter_glovebox
import msgspec
import pytest
from jupyter_glovebox.limits import v1
from jupyter_glovebox.limits.host import Host

UID = 61234
_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "freezer")

_CODE = """
import os, subprocess, sys
sys.path[:0] = {path!r}
from pathlib import Path
from jupyter_glovebox import limits
from jupyter_glovebox.limits.base import LimitValues
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
mib = 1 << 20
values = LimitValues(
    memory=64 * mib, memory_budget=64 * mib, cpus=1, cpu_time=60, wall_time=60, processes=8, open_files=64
)
limiter = limits.choose(values, "k1", root=Path({root!r}))
bomb = subprocess.run(["/usr/bin/tail", "/dev/zero"], preexec_fn=limiter.enter, stdout=subprocess.DEVNULL)
breach = limiter.check()
print(limiter.kind, limits.refuse_reason(limiter), bomb.returncode, breach.budget, limiter.destroy().verified)
"""


@pytest.fixture
def given(tmp_path: Path) -> Iterator[tuple[Path, list[Path]]]:
    """A view of the hierarchies in which folders of this test stand for what the administrator makes."""
    if os.geteuid() != 0:
        pytest.skip("only root can make folders for another user")
    if not os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK):
        pytest.skip("this machine has no writable cgroup v1 hierarchies")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    made: list[Path] = []
    name = f"gbtest-{uuid.uuid4()}"
    try:
        for controller in _CONTROLLERS:
            made.append(Path("/sys/fs/cgroup", controller, name))
            made[-1].mkdir()
            (tmp_path / controller).symlink_to(made[-1])
        yield tmp_path, made
    finally:
        for folder in made:
            for left in (*folder.glob(f"glovebox-{UID}/k1"), *folder.glob(f"glovebox-{UID}"), folder):
                left.rmdir()


def test_the_fix_that_is_printed_works(given: tuple[Path, list[Path]]) -> None:
    root, made = given
    host = Host(root, Path("/proc"), Path("/run"), UID)
    command = v1.fix(host).partition("   (")[0].removeprefix("sudo ")
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert all((folder / f"glovebox-{UID}").is_dir() for folder in made)
    path = [str(Path(m.__file__ or "").parents[1]) for m in (jupyter_glovebox, msgspec)]
    # The interpreter starts as root and then becomes the user: the user may not be able to read it.
    code = _CODE.format(path=path, uid=UID, root=str(root))
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.stdout == "cgroup-v1 None -9 memory True\n", ended.stderr
    assert [
        entry.name for folder in made for entry in (folder / f"glovebox-{UID}").iterdir() if entry.is_dir()
    ] == []

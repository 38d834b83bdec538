"""Every attack of the table works outside and is refused inside."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .attacks import ATTACKS, PRELUDE, Attack
from .conftest import OTHER_USER, as_user

PYTHON = "/usr/bin/python3"
# What says that this machine has no such thing, so that there is nothing to refuse.
ABSENT = {"refused ENOSYS", "refused EAFNOSUPPORT", "refused ENOPROTOOPT", "refused ENOENT", "refused EIO"}


@pytest.fixture
def targets(who: str, outdoors: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """What attacks aim at, as they see it `outside` and `inside`."""
    name = uuid.uuid4().hex
    for folder in ("secret", "dir", "own", "control", "granted"):
        (outdoors / folder).mkdir()
    (outdoors / "secret/canary").write_text(name)
    shutil.copy("/usr/bin/true", outdoors / "secret/program")
    (outdoors / "own/stage.py").write_text("pass")
    for folder in ("control", "granted"):
        (outdoors / folder / "input").write_text("1,2,3\n")
        (outdoors / folder / "other").write_text("4,5,6\n")
    (outdoors / "null").touch()
    if os.getuid() == 0:
        (outdoors / "null").unlink()
        os.mknod(outdoors / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    if who == "other":
        for path in outdoors.rglob("*"):
            shutil.chown(path, OTHER_USER, OTHER_USER)
    shm = ctypes.CDLL(None).shmget(key := uuid.uuid4().int & 0x7FFFFFFF, 4096, 0o1666)
    sleeper = subprocess.Popen([*as_user(who), "sleep", "60"], cwd="/")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract, \
            socket.socket(socket.AF_UNIX) as named:  # fmt: skip
        abstract.bind("\0" + name)
        abstract.listen()
        named.bind(str(outdoors / "socket"))
        named.listen()
        os.chmod(outdoors / "socket", 0o777)
        common = {
            "canary": f"{outdoors}/secret/canary", "program": f"{outdoors}/secret/program", "secret": name,
            "sleeper": sleeper.pid, "port": tcp.getsockname()[1], "abstract": name,
            "socket": f"{outdoors}/socket", "shm": key,
        }  # fmt: skip
        outside = {
            "side": "outside", "dir": f"{outdoors}/dir", "peer": "self", "input": f"{outdoors}/control/input",
            "root": str(outdoors), "own": f"{outdoors}/own", "mounted": "/tmp", "null": f"{outdoors}/null",
        }  # fmt: skip
        inside = {
            "side": "inside", "dir": "/tmp", "peer": "1", "input": f"{outdoors}/granted/input", "root": "",
            "own": "/run/glovebox", "mounted": "/usr", "null": "/dev/null",
        }  # fmt: skip
        yield {"outside": common | outside, "inside": common | inside}
    sleeper.kill()
    sleeper.wait()
    ctypes.CDLL(None).shmctl(shm, 0, None)


def _tree(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mode, p.stat().st_mtime_ns) for p in folder.iterdir()}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: f"{a.group}-{a.name}")
def test_attack(
    attack: Attack,
    who: str,
    targets: dict[str, dict[str, Any]],
    outdoors: Path,
    inside: Callable[..., dict[str, Any]],
    outside: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if attack.control == "root" and (who == "other" or os.getuid() != 0):
        pytest.skip("outside, only root can do it")
    if attack.x86_only and platform.machine() != "x86_64":
        pytest.skip("only x86-64 has this call")
    monkeypatch.setenv("GLOVEBOX_CANARY", "canary-of-the-host")
    code = PRELUDE + attack.code
    leaked = os.open(targets["outside"]["canary"], os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        with open(outdoors / "null", "rb") as null:
            control = outside(
                [PYTHON, "-c", code, json.dumps(targets["outside"])],
                namespace=attack.control == "namespace", stdin=null, pass_fds=(leaked,),
            )  # fmt: skip
        if control.strip() in ABSENT:
            pytest.skip(f"this machine has nothing to attack: {control.strip()}")
        assert control == "WORKED\n", "the control outside must work"
        before = _tree(outdoors / "granted")
        result = inside([PYTHON, "-c", code, json.dumps(targets["inside"])], inputs=(f"{outdoors}/granted",))
    finally:
        os.close(leaked)
    assert result["status"] == 0, result
    assert result["out"].startswith("refused ")
    assert "WORKED" not in result["out"]
    assert _tree(outdoors / "granted") == before

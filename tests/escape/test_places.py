"""Every place where something could be written has an end, and nothing gains privileges."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FILL = """
import os, sys
try:
    with open(sys.argv[1] + "/bomb", "wb") as f:
        for _ in range(12):
            f.write(bytes(1 << 20))
    print("WORKED")
except OSError as error:
    print("refused", error.errno)
"""
EROFS, ENOSPC = 30, 28


@pytest.mark.parametrize(
    ("place", "errno"),
    [
        ("/", EROFS), ("/dev", EROFS), ("/etc", EROFS), ("/run", EROFS), ("/run/glovebox", EROFS),
        ("/home", EROFS), ("/dev/shm", ENOSPC), ("/tmp", ENOSPC), ("~", ENOSPC), (".", ENOSPC),
        ("outputs", ENOSPC), ("/run/kernel", ENOSPC),
    ],
)  # fmt: skip
def test_bomb(
    place: str, errno: int, who: str, outdoors: Path, inside: Callable[..., Any], outside: Callable[..., str]
) -> None:
    if place == "/home" and not os.path.expanduser("~").startswith("/home/") and who == "own":
        pytest.skip("this user's home is not below /home")
    assert outside(["/usr/bin/python3", "-c", FILL, str(outdoors)]) == "WORKED\n"
    command = ["/bin/sh", "-c", f'exec /usr/bin/python3 -c "$0" {place}', FILL]
    result = inside(command)
    assert result == {"out": f"refused {errno}\n", "status": 0}


def test_setuid_program_gains_nothing(who: str, inside: Callable[..., Any], outside: Callable[..., str],
                                      tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    if who == "own":
        pytest.skip("needs an ordinary user and root to make the program")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = f"{folder}/id"
        shutil.copy("/usr/bin/id", program)
        os.chmod(program, 0o4755)
        assert "euid=0" in outside([program])
        result = inside([program], inputs=(program,))
    assert result["status"] == 0
    assert "uid=" in result["out"]
    assert "euid" not in result["out"]


def test_nothing_but_the_grants_is_there(inside: Callable[..., Any]) -> None:
    """The control is the list itself: names the host has and the sandbox must not."""
    names = ["/root/.ssh", "/var/log", "/boot", "/opt", "/srv", "/mnt", "/media", "/run/dbus", "/run/systemd",
             "/etc/shadow", "/etc/machine-id", "/etc/ssh", "/sys/fs", "/sys/kernel", "/dev/mem", "/dev/kmsg",
             "/dev/fuse", "/dev/kvm", "/dev/vda", "/dev/sda"]  # fmt: skip
    assert sum(map(os.path.lexists, names)) > 4
    script = "import json, os, sys; print(json.dumps([n for n in sys.argv[1:] if os.path.lexists(n)]))"
    assert json.loads(inside(["/usr/bin/python3", "-c", script, *names])["out"]) == []


def test_identity(who: str, inside: Callable[..., Any]) -> None:
    status = inside(["/bin/cat", "/proc/self/status"])["out"]
    values = dict(re.findall(r"^(\w+):\s*(.*)$", status, re.M))
    assert values["Uid"].split()[0] != "0"
    assert {values[n] for n in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert values["NoNewPrivs"] == "1"
    assert values["Seccomp"] == "2"
    assert inside(["/bin/hostname"])["out"] == "glovebox\n"


def test_only_three_descriptors(inside: Callable[..., Any]) -> None:
    script = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])"
    assert inside(["/usr/bin/python3", "-c", script])["out"] == "[0, 1, 2]\n"


def test_own_processes_only(inside: Callable[..., Any]) -> None:
    script = "import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    assert inside(["/usr/bin/python3", "-c", script])["out"] == "[1, 2]\n"

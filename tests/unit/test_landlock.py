"""Landlock: the rules, and their effect without any mount namespace around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_glovebox.sandbox import landlock, stage
from jupyter_glovebox.sandbox.base import Mounted

MOUNTS = (Mounted(target="/", writable=False), Mounted(target="/work", writable=True))


def test_old_kernels_get_no_rules() -> None:
    assert landlock.ruleset(MOUNTS, 0, root=False) is None
    assert landlock.ruleset(MOUNTS, 1, root=False) is None


@pytest.mark.parametrize("abi", range(2, 11))
def test_only_known_rights_are_asked_for(abi: int) -> None:
    rules = landlock.ruleset(MOUNTS, abi, root=False)
    assert rules is not None
    assert bool(rules.handled_fs & landlock.TRUNCATE) == (abi >= 3)
    assert bool(rules.handled_fs & landlock.IOCTL_DEV) == (abi >= 5)
    assert bool(rules.scoped) == (abi >= 6)
    assert all(access & ~rules.handled_fs == 0 for _, access in rules.rules)


def test_writing_is_granted_where_mounts_are_writable() -> None:
    rules = landlock.ruleset(MOUNTS, 7, root=True)
    assert rules is not None
    granted = dict(rules.rules)
    assert granted["/work"] & landlock.MAKE_REG
    assert not granted["/"] & (landlock.WRITE_FILE | landlock.MAKE_REG | landlock.REMOVE_FILE)
    assert all(not access & (landlock.MAKE_CHAR | landlock.MAKE_BLOCK) for access in granted.values())
    assert "/proc" not in granted


PROBE = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[2])
import importlib.util
spec = importlib.util.spec_from_file_location("stage", sys.argv[3])
stage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stage)
rules = json.loads(sys.argv[1])
if rules:
    stage._libc.prctl(38, 1, 0, 0, 0)
    stage.landlock(*rules)
for action in sys.argv[4:]:
    try:
        exec(action)
        print("done")
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(landlock.detect_abi() < landlock.LOWEST_ABI, reason="this kernel has no Landlock")
def test_rules_hold_by_themselves(tmp_path: Path) -> None:
    """The same actions without the rules (the control), then with them."""
    writable, other, outside = (tmp_path / n for n in ("root/writable", "root/other", "outside"))
    for folder in (writable, other, outside):
        folder.mkdir(parents=True)
        (folder / "f").write_text("x")
    rules = landlock.ruleset(
        (Mounted(target=str(writable), writable=True),), landlock.detect_abi(), root=True
    )
    assert rules is not None
    paths = [(str(tmp_path / "root") if path == "/" else path, access) for path, access in rules.rules]
    given = (rules.abi, rules.handled_fs, rules.scoped, [p for p in paths if p[0] != "/dev"])
    actions = [
        f"open({str(writable / 'f')!r}, 'a').write('y')",
        f"os.rename({str(writable / 'f')!r}, {str(writable / 'g')!r})",
        f"os.rename({str(writable / 'g')!r}, {str(writable / 'f')!r})",
        f"open({str(other / 'f')!r}).read()",
        f"open({str(other / 'f')!r}, 'a')",
        f"os.truncate({str(other / 'f')!r}, 1)",
        f"os.mkdir({str(other / 'd')!r}); os.rmdir({str(other / 'd')!r})",
        f"open({str(outside / 'f')!r}).read()",
        f"os.listdir({str(outside)!r})",
        f"stage.check_landlock({str(writable)!r}.encode())",
    ]

    def probe(rules: object) -> list[str]:
        command = [
            sys.executable,
            "-c",
            PROBE,
            json.dumps(rules),
            json.dumps(sys.path),
            stage.__file__,
            *actions,
        ]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30).stdout.split()

    assert probe(None)[:9] == ["done"] * 9
    assert probe(given) == ["done"] * 4 + ["refused"] * 5 + ["done"]


@pytest.mark.skipif(
    os.getuid() != 0 and landlock.detect_abi() == 0, reason="needs a kernel that makes whiteouts"
)
def test_probe_notices_missing_rules(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no effect"):
        stage.check_landlock(os.fsencode(tmp_path))
    assert list(tmp_path.iterdir()) == []

"""Fixtures of the escape tests.

Everything runs as the user of the test run. When that is root, GLOVEBOX_TEST_USER and
GLOVEBOX_TEST_PYTHON (an interpreter that this user can read, with the dependencies) add an ordinary user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import box

ROOT = Path(__file__).resolve().parents[2]
OTHER_USER = os.environ.get("GLOVEBOX_TEST_USER", "")
OTHER_PYTHON = os.environ.get("GLOVEBOX_TEST_PYTHON", "")


def as_user(who: str) -> list[str]:
    """The prefix of a command line that runs as `own` or `other`."""
    if who == "own":
        return []
    return ["setpriv", "--reuid", OTHER_USER, "--regid", OTHER_USER, "--init-groups", "env",
            f"HOME=/home/{OTHER_USER}", f"PYTHONPATH={ROOT / 'provisioner'}:{ROOT / 'tests'}"]  # fmt: skip


@pytest.fixture(params=["own", "other"])
def who(request: pytest.FixtureRequest) -> str:
    """Each user that can be tested here."""
    if request.param == "other" and not (os.getuid() == 0 and OTHER_USER and OTHER_PYTHON):
        pytest.skip("GLOVEBOX_TEST_USER and GLOVEBOX_TEST_PYTHON name no second user")
    return str(request.param)


@pytest.fixture
def inside(who: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`inside(argv, inputs=())` runs a command in a sandbox as `who`: `{"out", "status"}`."""

    def _inside(argv: list[str], *, inputs: tuple[str, ...] = ()) -> dict[str, Any]:
        if who == "own":
            workdir = tmp_path / "work"
            workdir.mkdir(exist_ok=True)
            return box.run(argv, box.make_plan(str(workdir), tuple(map(box.grant, inputs))))
        result = subprocess.run(
            [*as_user(who), OTHER_PYTHON, "-m", "escape.box"],
            input=json.dumps({"argv": argv, "inputs": inputs}), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    return _inside


@pytest.fixture
def outdoors(who: str) -> Iterator[Path]:
    """A folder outside every sandbox that `who` owns (pytest's own cannot be entered by others)."""
    folder = Path(tempfile.mkdtemp(prefix="glovebox-escape-"))
    if who == "other":
        shutil.chown(folder, OTHER_USER, OTHER_USER)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def outside(who: str) -> Callable[..., str]:
    """`outside(argv, namespace=False)` runs a command unsandboxed as `who` and gives its output."""

    def _outside(argv: list[str], *, namespace: bool = False, **more: Any) -> str:
        more.setdefault("cwd", "/")  # where the tests lie may be closed to another user
        prefix = ["unshare", "-Umur"] if namespace else []
        result = subprocess.run(
            [*as_user(who), *prefix, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60, check=False, **more,
        )  # fmt: skip
        return result.stdout

    return _outside

"""Other projects' suites with `glovebox` as the default provisioner (`peers.py` has the long ones)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import peers


def test_jupyter_kernel_test(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull,
        f"--rootdir={tmp_path}", str(Path(__file__).with_name("kernel_suite.py")),
    ]  # fmt: skip
    env = dict(os.environ, JUPYTER_DEFAULT_PROVISIONER_NAME="glovebox")
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-5000:]
    # 11 checks with samples above; the others (clear_output, stdin of a console) have none.
    assert "11 passed" in done.stdout
    from jupyter_glovebox.ledger.store import Ledger
    from jupyter_glovebox.locations import state_dir

    ledger = Ledger(state_dir() / "ledger.sqlite3")
    assert ledger.usage(), "the suite ran in no sandbox"
    ledger.close()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", peers.SUITES)
def test_suite(suite: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "peers"
    folder.mkdir(exist_ok=True)
    assert peers.run(suite, folder, plain=False, quiet=True)

"""Shared fixtures: every test has its own state and runtime folders, and leaves no process behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Private state, config and runtime folders; the runtime folder is short, for socket names."""
    base = tmp_path_factory.mktemp("glovebox")
    base.chmod(0o700)
    runtime = Path(tempfile.mkdtemp(prefix="gbx", dir="/tmp"))
    monkeypatch.setenv("JUPYTER_GLOVEBOX_STATE_DIR", str(base / "state"))
    monkeypatch.setenv("JUPYTER_GLOVEBOX_CONFIG_DIR", str(base / "config"))
    monkeypatch.setenv("JUPYTER_GLOVEBOX_RUNTIME_DIR", str(runtime))
    yield base
    shutil.rmtree(runtime, ignore_errors=True)


def _sandboxes() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"jupyter_glovebox.supervisor.main" in command or command.startswith(b"/usr/bin/bwrap"):
                found.add(int(entry.name))
    return found


@pytest.fixture(autouse=True, scope="session")
def nothing_survives() -> Iterator[None]:
    """No supervisor and no sandbox that this run started is left at its end."""
    before = _sandboxes()
    yield
    import time

    deadline = time.monotonic() + 10
    while (left := {pid for pid in _sandboxes() - before if _is_ours(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"sandboxes survived the tests: {left}"


def _is_ours(pid: int) -> bool:
    """Whether a process descends from, or was started in the session of, this test run."""
    try:
        return int(Path(f"/proc/{pid}/loginuid").read_text()) >= 0 and os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except (OSError, ValueError):
        return False

"""Shared fixtures: every test has its own state and runtime folders, and leaves no process behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PREFIX = f"/tmp/gbx{os.getpid()}-"


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Private state, config and runtime folders; the runtime folder is short, for socket names."""
    base = tmp_path_factory.mktemp("glovebox")
    base.chmod(0o700)
    runtime = Path(tempfile.mkdtemp(prefix=_PREFIX.removeprefix("/tmp/"), dir="/tmp"))
    monkeypatch.setenv("JUPYTER_GLOVEBOX_STATE_DIR", str(base / "state"))
    monkeypatch.setenv("JUPYTER_GLOVEBOX_CONFIG_DIR", str(base / "config"))
    monkeypatch.setenv("JUPYTER_GLOVEBOX_RUNTIME_DIR", str(runtime))
    yield base
    shutil.rmtree(runtime, ignore_errors=True)


def _supervisors() -> list[int]:
    """Supervisors that this test run started: they carry its runtime folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if _PREFIX.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if b"jupyter_glovebox.supervisor.main" in _cmdline(pid)]


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True, scope="session")
def nothing_survives() -> Iterator[None]:
    """No supervisor that this run started is left at its end; a sandbox cannot outlive its supervisor."""
    yield
    deadline = time.monotonic() + 10
    while (left := _supervisors()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"sandboxes survived the tests: {left}"

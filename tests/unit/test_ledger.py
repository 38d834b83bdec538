"""The ledger: one chain, many writers, and nothing lost or changed in silence."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.ledger.events import Cell, CleanupStep, Event, Process, Usage, UsageRecord, escape
from jupyter_glovebox.ledger.store import Ledger, LedgerError


def event(target: str = "/x", kernel: str = "k") -> Event:
    return Event(time=1.5, event_class="not-granted", operation="open", target=target, kernel_id=kernel,
                 notebook="/n.ipynb", plan="p")  # fmt: skip


def _write(path: str, worker: int, count: int) -> None:
    ledger = Ledger(path)
    for number in range(count):
        ledger.add_event(event(f"/{worker}/{number}"))
    ledger.close()


def test_many_writers_one_chain(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write, args=(path, n, 100)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ledger = Ledger(path)
    found, following = ledger.events(limit=10_000)
    assert [e.seq for e in found] == list(range(1, 801))
    assert following == 800
    assert {e.target for e in found} == {f"/{w}/{n}" for w in range(8) for n in range(100)}
    assert ledger.verify_chain() is None
    ledger.close()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_writer_that_is_killed_leaves_a_whole_chain(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    code = f"import sys; sys.path[:0] = {sys.path!r}\nfrom tests.unit.test_ledger import _write\n_write({path!r}, 0, 10**6)"
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root) as writer:
        deadline = time.monotonic() + 60
        while not Path(path).exists() or Path(path).stat().st_size < 50_000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        writer.send_signal(signal.SIGKILL)
    ledger = Ledger(path)
    ledger.add_event(event())
    found, _ = ledger.events(limit=10**6)
    assert [e.seq for e in found] == list(range(1, len(found) + 1))
    assert ledger.verify_chain() is None
    ledger.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET body = replace(body, '/x3', '/y3') WHERE seq = 4",
        "DELETE FROM entries WHERE seq = 4",
        "UPDATE entries SET seq = seq + 100 WHERE seq = 4",
        "UPDATE entries SET kernel_id = 'other' WHERE seq = 4",
        "UPDATE entries SET time = 0 WHERE seq = 4",
    ],
)
def test_changes_are_found(tmp_path: Path, change: str) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for number in range(8):
        ledger.add_event(event(f"/x{number}"))
    ledger.close()
    with sqlite3.connect(path) as db, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(change)
    db.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TRIGGER entries_stay")
    db.execute("DROP TRIGGER entries_remain")
    db.execute(change)
    db.close()
    ledger = Ledger(path)
    assert ledger.verify_chain() == 4
    ledger.close()


def test_kinds_and_filters(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.add_event(event(kernel="a"))
    ledger.add_event(event(kernel="b"))
    record = UsageRecord(kernel_id="a", notebook="/n.ipynb", plan="p", started=1, ended=2, closed_by="exit",
                         usage=Usage(cpu_seconds=1.5), cleanup={"processes": CleanupStep(verified=True, detail="x")})  # fmt: skip
    ledger.add_usage(record)
    ledger.add("approval", "", {"a": 1})
    assert [e.kernel_id for e in ledger.events(kernel_id="b")[0]] == ["b"]
    assert ledger.events(since=1)[0][0].seq == 2
    assert ledger.events(notebook="/other")[0] == []
    assert ledger.usage(kernel_id="a") == [record]
    assert ledger.records("approval") == [{"a": 1, "seq": 4}]
    with pytest.raises(ValueError, match="add_event"):
        ledger.add("event", "", {})
    ledger.close()


def test_stores_that_cannot_be_used(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"this is no database, it is long enough to look like one" * 50)
    newer = tmp_path / "newer"
    Ledger(newer).close()
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version = 99")
    db.close()
    (tmp_path / "link").symlink_to(newer)
    for path in (damaged, newer, tmp_path / "no/folder", tmp_path / "link", tmp_path):
        with pytest.raises(LedgerError) as caught:
            Ledger(path)
        assert caught.value.remedy


def test_a_full_disk_is_said_aloud(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root; the run by root has it")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    try:
        ledger = Ledger(folder / "ledger")
        with pytest.raises(LedgerError, match=r"[Ff]ull|space|disk"):
            for _ in range(3000):
                ledger.add_event(event("/x" * 500))
        assert ledger.verify_chain() is None
        ledger.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_entry_that_cannot_be_read_is_said_aloud(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.add_event(event())
    ledger.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TRIGGER entries_stay")
    db.execute("UPDATE entries SET body = replace(body, 'not-granted', 'made-up')")
    db.close()
    ledger = Ledger(path)
    with pytest.raises(LedgerError, match=r"Entry 1 .* cannot be read") as caught:
        ledger.events()
    assert "--verify" in caught.value.remedy
    ledger.close()


def test_the_tail_of_a_chain_can_be_cut_unseen(tmp_path: Path) -> None:
    """What a chain alone cannot show; docs/ledger.md says so."""
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for number in range(3):
        ledger.add_event(event(f"/x{number}"))
    ledger.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TRIGGER entries_remain")
    db.execute("DELETE FROM entries WHERE seq = 3")
    db.close()
    ledger = Ledger(path)
    assert ledger.verify_chain() is None
    assert [e.seq for e in ledger.events()[0]] == [1, 2]
    ledger.close()


def test_every_file_of_the_ledger_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    ledger = Ledger(folder / "ledger")
    ledger.add_event(event())
    assert {p.name: p.stat().st_mode & 0o777 for p in folder.iterdir()} == dict.fromkeys(
        ("ledger", "ledger-wal", "ledger-shm"), 0o600
    )
    ledger.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.getuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(LedgerError) as caught:
            Ledger(tmp_path / "ledger")
        tmp_path.chmod(0o700)
    else:
        folder = tmp_path / "fixed"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder)], check=True)
        try:
            with pytest.raises(LedgerError) as caught:
                Ledger(folder / "ledger")
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    assert "rights" in caught.value.remedy


@pytest.mark.parametrize("name", ["event", "usage"])
def test_schemas_are_current_and_hold(name: str) -> None:
    import jsonschema
    import msgspec
    import yaml
    from jupyter_glovebox.ledger import schema

    file = schema.FOLDER / f"{name}.yaml"
    assert file.read_text() == schema.text(name), "run: python -m jupyter_glovebox.ledger.schema"
    shape = yaml.safe_load(file.read_text())
    assert shape["version"] == "1"
    assert shape["type"] == "object"
    assert "$ref" not in file.read_text()
    cell = Cell(execution_count=1, msg_id="m", index=0)
    process = Process(pid=1, comm="python", cmdline="python x")
    examples: dict[str, Any] = {
        "event": msgspec.structs.replace(event(), cell=cell, process=process),
        "usage": UsageRecord(kernel_id="k", notebook=None, plan="p", started=1, ended=2, closed_by="exit",
                             usage=Usage(), cleanup={"cgroup": CleanupStep(verified=False, detail="x")}),
    }  # fmt: skip
    good = msgspec.to_builtins(examples[name])
    checker = jsonschema.Draft202012Validator(shape)
    checker.check_schema(shape)
    checker.validate(good)
    for key in ("kernel_id", "plan"):
        with pytest.raises(jsonschema.ValidationError):
            checker.validate({k: v for k, v in good.items() if k != key})
    with pytest.raises(jsonschema.ValidationError):
        checker.validate({**good, "kernel_id": 7})


def test_escape() -> None:
    assert escape("plain/ü.txt") == "plain/ü.txt"
    assert escape(b"\xff\n\x1b[31m") == "\\xff\\x0a\\x1b[31m"
    assert escape("a\u202eb\u200b") == "a\\u202eb\\u200b"

"""The export boundary against hostile files: nothing follows a link, nothing hangs, nothing is half-written."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.artifacts import identify, intake, promote, verify
from jupyter_glovebox.artifacts.model import Artifact, Candidate
from jupyter_glovebox.ledger.store import Ledger
from jupyter_glovebox.manifest.model import DEFAULT_OUTPUTS
from jupyter_glovebox.manifest.plan import TYPES, Outputs


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder


def collect(folder: Path, tmp_path: Path, **limits: Any) -> list[Candidate]:
    snapshots = tmp_path / f"snapshots-{len(list(tmp_path.iterdir()))}"
    snapshots.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return intake.collect(
            fd,
            snapshots,
            **{"max_files": 20, "max_file_size": 10 << 20, "max_total_size": 20 << 20, **limits},
        )
    finally:
        os.close(fd)


def codes(candidates: list[Candidate]) -> dict[str, str]:
    return {c.name: c.reasons[0].code if c.reasons else "taken" for c in candidates}


def test_only_plain_files_come_in(outputs: Path, tmp_path: Path) -> None:
    (outputs / "good.txt").write_text("good")
    (outputs / "sub").mkdir()
    (outputs / "sub/inner.txt").write_text("inner")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (outputs / "link.txt").symlink_to(secret)
    (outputs / "folder-link").symlink_to(tmp_path)
    os.link(secret, outputs / "hard.txt")
    os.mkfifo(outputs / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(outputs)
        listener.bind("sock")
        found = collect(outputs, tmp_path)
    assert codes(found) == {
        "good.txt": "taken",
        "sub/inner.txt": "taken",
        "link.txt": "not-regular",
        "folder-link": "not-regular",
        "hard.txt": "hard-link",
        "fifo": "not-regular",
        "sock": "not-regular",
    }
    assert {Path(c.snapshot).read_text() for c in found if c.snapshot} == {"good", "inner"}


@pytest.mark.parametrize(
    "name",
    [b"new\nline.txt", b"\x1b[31m.txt", "bidi\u202e.txt".encode(), b"\xff.txt", b".hidden", b"-rf.txt", b"con.txt",
     b"space .txt ", b"a:b.txt", b"n" * 250],
)  # fmt: skip
def test_names_that_may_not_leave(outputs: Path, tmp_path: Path, name: bytes) -> None:
    (outputs / os.fsdecode(name)).write_text("x")
    assert list(codes(collect(outputs, tmp_path)).values()) == ["name"]


def test_bounds(outputs: Path, tmp_path: Path) -> None:
    for number in range(6):
        (outputs / f"{number}.txt").write_bytes(b"x" * 1000)
    assert sorted(codes(collect(outputs, tmp_path, max_files=4)).values()) == ["count"] * 2 + ["taken"] * 4
    assert set(codes(collect(outputs, tmp_path, max_file_size=999)).values()) == {"size"}
    assert (
        sorted(codes(collect(outputs, tmp_path, max_total_size=3500)).values())
        == ["taken"] * 3 + ["total-size"] * 3
    )
    with open(outputs / "sparse.txt", "wb") as file:
        file.truncate(1 << 40)
    assert codes(collect(outputs, tmp_path))["sparse.txt"] == "size"
    deep = outputs
    for _ in range(30):
        deep = deep / "d"
        deep.mkdir()
    assert "depth" in codes(collect(outputs, tmp_path)).values()


def test_very_many_entries(outputs: Path, tmp_path: Path) -> None:
    for number in range(12_000):
        os.close(os.open(outputs / f"f{number}", os.O_CREAT))
    found = collect(outputs, tmp_path)
    assert len(found) < 300
    assert "further entries" in found[-1].reasons[0].message


def test_a_file_that_changes_all_the_time(outputs: Path, tmp_path: Path) -> None:
    target = outputs / "grow.txt"
    target.write_bytes(b"x" * 1000)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for change in (lambda: target.write_bytes(b"y" * 4_000_000), lambda: target.unlink(missing_ok=True),
                           lambda: target.symlink_to("/etc/passwd"), lambda: target.unlink(missing_ok=True)):  # fmt: skip
                try:
                    change()
                except OSError:
                    continue

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(40):
            for candidate in collect(outputs, tmp_path):
                if candidate.snapshot:
                    content = Path(candidate.snapshot).read_bytes()
                    assert set(content) <= {ord("x"), ord("y")}
                    assert len(content) == candidate.size
    finally:
        stop.set()
        thread.join()


def check(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], object], **changes: Any
) -> tuple[Artifact, bytes]:
    """The verdict on one file, and its snapshot afterwards."""
    folder = tmp_path / f"in-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    if callable(content):
        content(folder / name)
    else:
        (folder / name).write_bytes(content)
    candidates = collect(folder, tmp_path, max_file_size=200 << 20, max_total_size=400 << 20)
    given = Outputs(
        **{f: getattr(DEFAULT_OUTPUTS, f) for f in DEFAULT_OUTPUTS.__struct_fields__}
        | {"types": TYPES}
        | changes
    )
    (artifact,) = verify.verify(candidates, given)
    assert candidates[0].snapshot
    return artifact, Path(candidates[0].snapshot).read_bytes()


def _png(path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(1, 1))
    figure.savefig(path)
    plt.close(figure)


def _xlsx(path: Path, value: object = 1) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    book.active["A1"] = value
    book.save(path)


def _zip(path: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


_BOOK = {"[Content_Types].xml": b"<Types/>", "xl/workbook.xml": b"<w/>"}


@pytest.mark.parametrize(
    ("name", "content", "verdict", "code"),
    [
        ("a.csv", b"a,b\n1,2\n", "allow", ""),
        ("a.tsv", b"a\tb\n1\t2\n", "allow", ""),
        ("a.txt", "Zürich\n".encode(), "allow", ""),
        ("a.json", b'{"a": [1, 2.5, null]}', "allow", ""),
        ("a.jsonl", b'{"a": 1}\n{"a": 2}\n', "allow", ""),
        ("a.png", _png, "allow", ""),
        ("a.xlsx", _xlsx, "allow", ""),
        ("a.csv", b"\x7fELF" + bytes(64), "reject", "type"),
        ("a.csv", b"#!/bin/sh\nrm -rf /\n", "reject", "type"),
        ("a.png", b"a,b\n", "reject", "name-type"),
        ("a.txt", b"%PDF-1.7\n", "reject", "name-type"),
        ("a.csv", b"a\0b\n", "reject", "type"),
        ("a.txt", b"\x1b]0;title\x07", "reject", "control-characters"),
        ("a.csv", "a\nü\n".encode("latin-1"), "reject", "type"),
        ("a.json", b"{'a': 1}", "reject", "structure"),
        ("a.json", b"[" * 100_000, "reject", "structure"),
        ("a.csv", b"x" * (5 << 20), "reject", "structure"),
        ("a.html", b"<html><script>1</script></html>", "review", "active-content"),
        ("a.svg", b"<svg onload='x'/>", "review", "active-content"),
        ("a.parquet", b"PAR1" + bytes(20), "unverified", "not-inspected"),
        ("a.pkl", b"\x80\x04K\x01.", "reject", "type"),
        ("k.txt", b"x" * ((1 << 20) - 20) + b"\n-----BEGIN RSA PRIVATE KEY-----\n", "reject", "secret"),
        ("k.csv", b"key\nAKIAIOSFODNN7EXAMPLE\n", "reject", "secret"),
        ("k.txt", b"postgres://user:hunter22@db.example/x", "reject", "secret"),
        ("m.xlsx", lambda p: _zip(p, {**_BOOK, "xl/vbaProject.bin": b"x"}), "reject", "macro"),
        ("l.xlsx", lambda p: _zip(p, {**_BOOK, "xl/externalLinks/externalLink1.xml": b"<x/>"}), "reject", "external-link"),
        ("e.xlsx", lambda p: _zip(p, {**_BOOK, "xl/x.xml": b"<!DOCTYPE a [<!ENTITY b 'c'>]>"}), "reject", "xml-entities"),
        ("b.xlsx", lambda p: _zip(p, {**_BOOK, "xl/x.xml": b"0" * (64 << 20)}), "reject", "archive-bomb"),
        ("f.xlsx", lambda p: _xlsx(p, '=WEBSERVICE("http://x.example")'), "reject", "formula"),
        ("s.xlsx", lambda p: _xlsx(p, "AKIAIOSFODNN7EXAMPLE"), "reject", "secret"),
        ("t.xlsx", lambda p: p.write_bytes(b"PK\x03\x04" + bytes(100)), "reject", "name-type"),
    ],
)  # fmt: skip
def test_verdicts(tmp_path: Path, name: str, content: Any, verdict: str, code: str) -> None:
    artifact, _ = check(tmp_path, name, content)
    assert (artifact.verdict, artifact.reasons[0].code if artifact.reasons else "") == (verdict, code), (
        artifact
    )


def test_an_image_with_something_behind_it(tmp_path: Path) -> None:
    _png(tmp_path / "x.png")
    content = (tmp_path / "x.png").read_bytes()
    assert check(tmp_path, "a.png", content)[0].verdict == "allow"
    for bad, code in ((content + b"PK\x03\x04", "trailing-data"), (content[:-20], "structure")):
        artifact, _ = check(tmp_path, "a.png", bad)
        assert (artifact.verdict, artifact.reasons[0].code) == ("reject", code)


def test_formulas_are_neutralised_and_numbers_stay(tmp_path: Path) -> None:
    table = b'name,amount\n=HYPERLINK(1),-1.5\n+41 44,+2\n@cmd,"1\'234.50"\n-x,-1e5\n"=1,2",-\n'
    artifact, after = check(tmp_path, "a.csv", table)
    assert artifact.verdict == "fixed"
    assert after.decode() == (
        "name,amount\n'=HYPERLINK(1),-1.5\n+41 44,+2\n'@cmd,1'234.50\n'-x,-1e5\n\"'=1,2\",-\n"
    )
    assert artifact.bytes == len(after)
    assert check(tmp_path, "b.csv", table, formulas="reject")[0].verdict == "reject"
    assert check(tmp_path, "c.csv", table, formulas="allow")[0].verdict == "allow"


@pytest.mark.parametrize(
    ("expect", "verdict"),
    [
        ({"columns": {"id": "string", "n": "number"}, "min_rows": 2}, "allow"),
        ({"columns": {"id": "string", "n": "integer"}}, "reject"),
        ({"columns": {"id": "string"}}, "reject"),
        ({"min_rows": 3}, "reject"),
        ({"checksum": 1}, "unverified"),
        ({"columns": {"id": "date", "n": "number"}}, "unverified"),
    ],
)
def test_expectations(tmp_path: Path, expect: dict[str, Any], verdict: str) -> None:
    artifact, _ = check(tmp_path, "a.csv", b"id,n\na,1.5\nb,\n", expect={"a.csv": expect})
    assert artifact.verdict == verdict, artifact.reasons


def test_types_that_were_not_named(tmp_path: Path) -> None:
    artifact, _ = check(tmp_path, "a.csv", b"a\n", types=("png",))
    assert (artifact.verdict, artifact.reasons[0].code) == ("reject", "type")
    assert "csv" in artifact.reasons[0].remedy


def test_identify_agrees_with_its_own_names() -> None:
    for kind in TYPES:
        assert identify.agrees(kind, f"x{identify.SUFFIXES.get(kind, (f'.{kind}',))[0]}")
    assert not identify.agrees("csv", "x.csv.exe")


class Promoter:
    """Promotes one file's content under a name."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.ledger = Ledger(tmp_path / "ledger")
        self.destination = tmp_path / "out"

    def __call__(self, name: str, content: str) -> Artifact:
        folder = self.tmp_path / f"p-{len(list(self.tmp_path.iterdir()))}"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
        candidates = collect(folder, self.tmp_path)
        (artifact,) = promote.promote(
            verify.verify(candidates, DEFAULT_OUTPUTS), candidates, self.destination, ledger=self.ledger,
            kernel_id="k", plan_digest="p", notebook=None,
        )  # fmt: skip
        return artifact


@pytest.fixture
def put(tmp_path: Path) -> Any:
    promoter = Promoter(tmp_path)
    yield promoter
    promoter.ledger.close()


def test_promotion_replaces_only_its_own_unchanged_file(put: Promoter) -> None:
    target = put.destination / "a.txt"
    assert put("a.txt", "one").exported_to == str(target)
    assert target.stat().st_mode & 0o777 == 0o644
    assert put("a.txt", "two").exported_to == str(target)
    assert target.read_text() == "two"
    target.write_text("edited by a person")
    assert put("a.txt", "three").exported_to == str(put.destination / "a (2).txt")
    assert target.read_text() == "edited by a person"
    (put.destination / "b.txt").write_text("somebody's")
    assert put("b.txt", "x").exported_to == str(put.destination / "b (2).txt")
    records = put.ledger.records("promotion")
    assert [r["plan"] for r in records] == ["p"] * 4
    assert put.ledger.verify_chain() is None


def test_promotion_follows_no_link(put: Promoter) -> None:
    victim = put.tmp_path / "victim"
    victim.write_text("untouched")
    put.destination.mkdir()
    (put.destination / "a.txt").symlink_to(victim)
    (put.destination / "sub").symlink_to(put.tmp_path)
    assert put("a.txt", "x").exported_to == str(put.destination / "a (2).txt")
    inner = put("sub/victim", "x")
    assert inner.exported_to is None
    assert victim.read_text() == "untouched"
    assert put("deep/er/a.txt", "x").exported_to == str(put.destination / "deep/er/a.txt")


def test_a_full_disk_leaves_nothing_half_written(put: Promoter) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root; the run by root has it")
    put.destination.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(put.destination)], check=True)
    try:
        artifact = put("a.txt", "x" * 200_000)
        assert artifact.exported_to is None
        assert artifact.reasons[-1].code == "not-written"
        assert "space" in artifact.reasons[-1].message.lower()
        assert list(put.destination.iterdir()) == []
        assert put("b.txt", "x").exported_to
    finally:
        subprocess.run(["umount", str(put.destination)], check=True)


def test_verify_paths(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.csv").write_text("a\n=1+1\n")
    (folder / "b.csv").symlink_to("a.csv")
    found = verify.verify_paths([folder, folder / "a.csv"], DEFAULT_OUTPUTS)
    assert [(Path(a.path).name, a.verdict) for a in found] == [
        ("a.csv", "fixed"),
        ("b.csv", "reject"),
        ("a.csv", "fixed"),
    ]
    assert (folder / "a.csv").read_text() == "a\n=1+1\n", "verify changes nothing"

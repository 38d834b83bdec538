"""Files made to look harmless to one reader and to act in another. Each has an honest twin that passes."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.artifacts import intake, verify
from jupyter_glovebox.artifacts.model import Candidate
from jupyter_glovebox.manifest.model import DEFAULT_OUTPUTS

from .test_artifacts import check, codes, collect

Book = dict[str, bytes]
_SHEET = "xl/worksheets/sheet1.xml"


def verdict(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], object], **changes: Any
) -> tuple[str, str]:
    artifact, _ = check(tmp_path, name, content, **changes)
    return artifact.verdict, artifact.reasons[0].code if artifact.reasons else ""


# -- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Split at the separator that the first line suggests, and at those that spreadsheets choose.
        ("a|b|c|d\nx,=cmd()|1|2|3\n", ("review", "formula")),
        ("a,b\nx;+cmd|'/C calc'!A0,1\n", ("review", "formula")),
        ("a,b\n-1,2+cmd|'/C calc'!A0\n", ("review", "formula")),
        ("a;b\nx;-1,2+cmd|'/C calc'!A0\n", ("fixed", "formula")),
        ("a|b|c|d\nx,y|1|2|3\n", ("allow", "")),
        ("sep=x\nfoox=cmd()\n", ("reject", "structure")),
        ("sep=;\nfoo;=cmd()\n", ("fixed", "formula")),
        ("sep=;\na;b\n", ("allow", "")),
        # Blanks before the sign.
        ('a\n"\n=cmd()"\n', ("fixed", "formula")),
        ("a,\u00a0=cmd()\n", ("fixed", "formula")),
        ("\ufeffa,b\n\ufeff=cmd(),1\n", ("fixed", "formula")),
        ("a\n\uff1dcmd()\n", ("fixed", "formula")),
        ("a,b\nx,          =cmd()\n", ("fixed", "formula")),
        # Quotes that one reader closes and another does not.
        ('a,b\n"x,1\n=cmd(),2\n', ("reject", "structure")),
        ('a,b\n"x"y,1\n', ("reject", "structure")),
        # What people write.
        ("datum;betrag\n01.02.2024;-1'234.50\n02.02.2024;5,-\n", ("allow", "")),
        ("n,text\n-1.5,foo (bar)\n-2,a - b\n+3,--\n", ("allow", "")),
        ("n\n-inf\n-1e-5\n-12 %\n-\n+41 44 123 45 67\n", ("allow", "")),
        ("mail,url\na@b.example,https://x.example/?a=b\n", ("allow", "")),
        ("name\nZoë-Müller\nGöteborg\n", ("allow", "")),
    ],
)
def test_tables(tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    assert verdict(tmp_path, "a.csv", text.encode()) == expected


def test_the_quick_look_misses_nothing(tmp_path: Path) -> None:
    """The fast question put to bytes answers yes wherever the slow one, put to cells, does."""
    from hypothesis import example, given, settings
    from hypothesis import strategies as st
    from jupyter_glovebox.artifacts import tables

    path = tmp_path / "t.csv"

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.text(st.sampled_from("=+-@,;\t| \"\n\r1.,e%()'xü\u00a0\ufeff\uff1d\u2003"), max_size=12))
    @example('"-1,x"')
    @example('"-1\nx"')
    @example('"\n-1,x"')
    @example('-1"x')
    @example("-1e 5")
    @example("-1\ufeff2")
    @example("-1.5x")
    @example(" \u2003=x")
    @example("-1;")
    def ask(text: str) -> None:
        path.write_bytes(text.encode())
        for delimiter in ",;\t|":
            read = tables._Read(delimiter, text.startswith("\ufeff"))
            if tables._count(str(path), read, acting=False)[0]:
                assert tables._quick_look(str(path), delimiter)[0], (text, delimiter)

    ask()


@pytest.mark.parametrize("content", [b'"\n",' * 2_000_000, b"-" + b"1" * 3_000_000 + b"x"])
def test_tables_that_are_expensive_to_read(tmp_path: Path, content: bytes) -> None:
    assert verdict(tmp_path, "a.csv", content)[0] != "allow"


def test_a_fixed_copy_keeps_marks_and_numbers(tmp_path: Path) -> None:
    artifact, after = check(tmp_path, "a.csv", b"\xef\xbb\xbfid;n\r\n=x;-1,50\r\n")
    assert (artifact.verdict, after) == ("fixed", b"\xef\xbb\xbfid;n\n'=x;-1,50\n")
    again, same = check(tmp_path, "a.csv", after)
    assert (again.verdict, same) == ("allow", after)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("\ufeffid,n\n1,2.5\n\n", ""),
        ('id,n\n1,"2.5"\n', ""),
        ("id,n\r\n1,\r\n", ""),
        ("id,n\n1,1_000\n", "column-type"),
        ("id,n\n1.0,2\n", "column-type"),
        ('id,n\n"1",x\n', "column-type"),
        ("id,n\n1,2,3\n", "columns"),
        ("id,n\n1\n", "columns"),
        ("id;n\n1,5;2\n", "column-type"),
        ("id,n\n", "rows"),
        ("", "columns"),
    ],
)
def test_expected_columns(tmp_path: Path, text: str, code: str) -> None:
    expect = {"a.csv": {"columns": {"id": "integer", "n": "number"}, "min_rows": 1}}
    assert verdict(tmp_path, "a.csv", text.encode(), expect=expect)[1] == code


def test_a_large_table_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    with open(path, "w") as file:
        file.write("id,name,n\n")
        rows = "".join(f"{i},name {i},{i * 7 % 1000 / 10 - 50}\n" for i in range(50_000))
        while file.tell() < 100 << 20:
            file.write(rows)
    code = (
        "import sys, resource, msgspec\n"
        "from jupyter_glovebox.artifacts import verify\n"
        "from jupyter_glovebox.artifacts.model import Candidate\n"
        "from jupyter_glovebox.manifest.model import DEFAULT_OUTPUTS as D\n"
        "e = {'big.csv': {'columns': {'id': 'integer', 'name': 'string', 'n': 'number'}}}\n"
        "o = msgspec.structs.replace(D, expect=e)\n"
        "(a,) = verify.verify([Candidate(name='big.csv', snapshot=sys.argv[1], size=1, sha256='x')], o)\n"
        "print(a.verdict, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    found, memory = done.stdout.split()
    assert found == "allow"
    assert int(memory) < 300 << 10, f"{memory} KiB"


# -- workbooks ----------------------------------------------------------------------------------


def _book(change: Callable[[Any], object] = lambda book: None) -> bytes:
    import openpyxl

    book, out = openpyxl.Workbook(), io.BytesIO()
    book.active["A1"] = "text"
    change(book)
    book.save(out)
    return out.getvalue()


def _with(parts: Book, *, base: bytes | None = None, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A workbook with parts replaced or added."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(base or _book())) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, parts.pop(name, None) or old.read(name))
        for name, content in parts.items():
            new.writestr(name, content)
    return out.getvalue()


def _honest(book: Any) -> None:
    from openpyxl.chart import BarChart, Reference
    from openpyxl.formatting.rule import FormulaRule

    sheet = book.active
    for row in range(2, 6):
        sheet.append(["x", row, -1.5])
    sheet["D1"] = "=SUM(B2:B5)"
    sheet.conditional_formatting.add("B2:B5", FormulaRule(formula=["B2>3"]))
    chart = BarChart()
    chart.add_data(Reference(sheet, min_col=2, min_row=2, max_row=5))
    sheet.add_chart(chart, "F1")


def _link(book: Any) -> None:
    book.active["A1"].hyperlink = "https://x.example/"


_FORMULA = b"<worksheet><sheetData><row><c><%b>%b</%b></c></row></sheetData></worksheet>"
_REL = b"<Relationships><Relationship Id='r' Type='http://s/%b' TargetMode%b Target='http://x.example'/></Relationships>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lambda: _book(_honest), ("allow", "")),
        (lambda: _book(_link), ("review", "external-link")),
        (lambda: _with({"xl/foo/bar.xml": _FORMULA % (b"f", b"WEBSERVICE(1)", b"f")}), ("reject", "formula")),
        (lambda: _with({_SHEET: _FORMULA % (b"x:f", b"WEBSERVICE(1)", b"x:f")}), ("reject", "formula")),
        (lambda: _with({_SHEET: _FORMULA % (b"f", b"WEB&#83;ERVICE(1)", b"f")}), ("reject", "formula")),
        (lambda: _with({_SHEET: _FORMULA % (b"f", b"WEB<!-- -->SERVICE(1)", b"f")}), ("reject", "formula")),
        (lambda: _with({_SHEET: _FORMULA % (b"f", b"cmd|'/C calc'!A0", b"f")}), ("reject", "formula")),
        (lambda: _with({_SHEET: _FORMULA % (b"f", b"<![CDATA[RTD(1)]]>", b"f")}), ("reject", "xml-entities")),
        (lambda: _with({_SHEET: _FORMULA % (b"f", b"HYPERLINK(1)", b"f")}), ("review", "external-link")),
        (lambda: _with({_SHEET: (_FORMULA % (b"f", b"RTD(1)", b"f")).decode().encode("utf-16")}), ("reject", "encoding")),
        (lambda: _with({_SHEET: b"<?xml version='1.0' encoding='UTF-7'?>" + _FORMULA % (b"v", b"1", b"v")}), ("reject", "encoding")),
        (lambda: _with({"xl/workbook2.xml": b"<definedName name='Auto_Open'>EXEC(1)</definedName>"}), ("reject", "formula")),
        (lambda: _with({"xl/_rels/a.xml.rels": _REL % (b"image", b" = 'External'")}), ("reject", "external-link")),
        (lambda: _with({"xl/_rels/a.xml.rels": _REL % (b"image", b"='&#69;xternal'")}), ("reject", "external-link")),
        (lambda: _with({"xl/_rels/a.xml.rels": _REL % (b"hyperlink", b"='External'")}), ("review", "external-link")),
        (lambda: _with({"xl/_rels/a.xml.rels": _REL % (b"oleObject", b"='Internal'")}), ("reject", "embedded-object")),
        (lambda: _with({"[Content_Types].xml": b"<Types><Override PartName='/xl/a.dat' ContentType='application/vnd.ms-office.vbaProject'/></Types>"}), ("reject", "macro")),
        (lambda: _with({"xl/macrosheets/s.xml": b"<x/>"}), ("reject", "macro")),
        (lambda: _with({"xl/foo.dat": b"MZ"}), ("review", "embedded-object")),
        (lambda: _with({"xl/a.xml": b"<t>AKIAIOSFODNN7EXAMPLE</t>"}), ("reject", "secret")),
        (lambda: _with({}, method=zipfile.ZIP_LZMA), ("reject", "structure")),
        (lambda: _book() + b"x", ("reject", "name-type")),
        (lambda: b"#" * 10 + _book(), ("reject", "type")),
    ],
)  # fmt: skip
def test_workbooks(tmp_path: Path, content: Callable[[], bytes], expected: tuple[str, str]) -> None:
    assert verdict(tmp_path, "a.xlsx", content()) == expected


def test_archives_that_are_read_in_two_ways(tmp_path: Path) -> None:
    whole = _with({}, method=zipfile.ZIP_STORED)
    assert verdict(tmp_path, "a.xlsx", whole)[0] == "allow"
    name = b"xl/workbook.xml"
    at = whole.index(name)
    renamed = whole[:at] + b"xl/evil_ook.xml" + whole[at + len(name) :]
    assert verdict(tmp_path, "a.xlsx", renamed) == ("reject", "structure")
    twice = io.BytesIO(whole)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "a") as archive:
        archive.writestr("xl/workbook.xml", b"<evil/>")
    assert verdict(tmp_path, "a.xlsx", twice.getvalue()) == ("reject", "structure")


def test_a_directory_that_is_larger_than_memory(tmp_path: Path) -> None:
    entry = bytearray(b"PK\1\2" + bytes(42))
    content = b"PK\3\4" + bytes(26) + bytes(entry) * 400_000
    end = (
        b"PK\5\6"
        + bytes(4)
        + b"\xff\xff\xff\xff"
        + (len(entry) * 400_000).to_bytes(4, "little")
        + (30).to_bytes(4, "little")
        + bytes(2)
    )
    assert verdict(tmp_path, "a.xlsx", content + end) == ("reject", "name-type")


# -- images, text -------------------------------------------------------------------------------


def _picture(kind: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.effect_noise((60, 40), 50).convert("RGB").save(out, kind)
    return out.getvalue()


def _archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x", "y")
    return out.getvalue()


def _chunk(name: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")


def test_images_that_are_archives(tmp_path: Path) -> None:
    jpeg, png, packed = _picture("jpeg"), _picture("png"), _archive()
    assert verdict(tmp_path, "a.jpg", jpeg) == ("allow", "")
    assert verdict(tmp_path, "a.png", png) == ("allow", "")
    polyglot = jpeg + packed[:-2] + b"\2\0\xff\xd9"
    with zipfile.ZipFile(io.BytesIO(polyglot)) as archive:
        assert archive.namelist() == ["x"], "positive control: it is an archive"
    assert verdict(tmp_path, "a.jpg", polyglot) == ("reject", "trailing-data")
    hidden = packed[:-2] + (4 + 12).to_bytes(2, "little")
    for name in (b"tEXt", b"juNK"):
        polyglot = png[:-12] + _chunk(name, hidden) + png[-12:]
        with zipfile.ZipFile(io.BytesIO(polyglot)) as archive:
            assert archive.namelist() == ["x"], "positive control: it is an archive"
        assert verdict(tmp_path, "a.png", polyglot)[0] == "reject"
    assert verdict(tmp_path, "a.jpg", jpeg[:-2]) == ("reject", "structure")
    assert verdict(tmp_path, "a.jpg", jpeg[: len(jpeg) // 2] + b"\xff\xd9")[0] in ("allow", "reject")
    damaged = png[:60] + bytes([png[60] ^ 1]) + png[61:]
    assert verdict(tmp_path, "a.png", damaged) == ("reject", "structure")
    huge = png[:8] + _chunk(b"IHDR", (1 << 20).to_bytes(4, "big") * 2 + png[24:29]) + png[33:]
    assert verdict(tmp_path, "a.png", huge) == ("reject", "archive-bomb")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "plain \u200f\u05e2\u05d1\n".encode(), ("allow", "")),
        ("a.txt", "a \u202e b\n".encode(), ("review", "bidi")),
        ("a.txt", b"x" * ((1 << 20) - 1) + "\u202e".encode(), ("review", "bidi")),
        ("a.txt", "\u009b31m".encode(), ("reject", "control-characters")),
        ("a.txt", b"x" * ((1 << 20) - 1) + "\u009b31m".encode(), ("reject", "control-characters")),
        ("a.txt", b"", ("allow", "")),
        ("a.txt", b"y" * (3 << 20) + b"\n" + b"y" * (3 << 20), ("allow", "")),
        ("a.txt", (b"y" * (1 << 19) + b"\n") * 2 + b"y" * (4 << 20) + b"z\nz", ("reject", "structure")),
        ("a.json", b"[" + b"1," * (3 << 20) + b"1]", ("allow", "")),
        ("a.json", b'{"a": NaN}', ("reject", "structure")),
        ("a.json", b"", ("reject", "structure")),
        ("a.jsonl", b"", ("allow", "")),
        ("a.html", b"<table border='1'></table>", ("review", "active-content")),
    ],
)  # fmt: skip
def test_texts(tmp_path: Path, name: str, content: bytes, expected: tuple[str, str]) -> None:
    assert verdict(tmp_path, name, content) == expected


def test_json_says_what_to_write_instead(tmp_path: Path) -> None:
    artifact, _ = check(tmp_path, "a.json", b'{"a": NaN}')
    assert "null" in artifact.reasons[0].remedy


def test_a_secret_has_a_line(tmp_path: Path) -> None:
    artifact, _ = check(tmp_path, "a.txt", b"x\n" * 700_000 + b"-----BEGIN PRIVATE KEY-----\n")
    assert artifact.reasons[0].where == "line 700001"


@pytest.mark.parametrize(
    "text",
    [
        "task-assessment-of-the-whole-long-portfolio-and-more",
        "AKIAIOSFODNN7EXAMPLEX",
        "https://x.example/a:b@c",
        "xoxo",
    ],
)
def test_what_only_looks_like_a_secret(tmp_path: Path, text: str) -> None:
    assert verdict(tmp_path, "a.txt", text.encode()) == ("allow", "")


def test_a_check_that_fails_is_no_pass(tmp_path: Path) -> None:
    missing = Candidate(name="a.csv", snapshot=str(tmp_path / "gone"), size=1, sha256="x")
    good = tmp_path / "good"
    good.write_bytes(b"a\n1\n")
    both = [missing, Candidate(name="b.csv", snapshot=str(good), size=4, sha256="x")]
    assert [(a.verdict, [r.code for r in a.reasons]) for a in verify.verify(both, DEFAULT_OUTPUTS)] == [
        ("unverified", ["check-failed"]),
        ("allow", []),
    ]


# -- intake -------------------------------------------------------------------------------------


def test_devices_and_setuid_files(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    (folder / "set.txt").write_text("x")
    (folder / "set.txt").chmod(0o6777)
    if os.getuid() == 0:
        os.mknod(folder / "zero.txt", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    else:
        (folder / "dark.txt").write_text("x")
        (folder / "dark.txt").chmod(0)
    found = collect(folder, tmp_path)
    other = {"zero.txt": "not-regular"} if os.getuid() == 0 else {"dark.txt": "unreadable"}
    assert codes(found) == {"set.txt": "taken", **other}
    taken = next(c.snapshot for c in found if c.snapshot)
    assert taken is not None
    assert os.stat(taken).st_mode & 0o7777 == 0o600


@pytest.mark.parametrize(
    ("one", "two"),
    [("Report.csv", "report.csv"), ("caf\u00e9.csv", "cafe\u0301.csv"), ("stra\u00dfe.csv", "STRASSE.csv")],
)
def test_names_that_are_one_on_other_systems(tmp_path: Path, one: str, two: str) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    for name in (one, two):
        (folder / name).write_text(name)
    assert sorted(codes(collect(folder, tmp_path)).values()) == ["name", "taken"]


@pytest.mark.parametrize("name", ["a\uff0fb.txt", "\uff0ea.txt", "a\uff1ab.txt"])
def test_letters_of_full_width(tmp_path: Path, name: str) -> None:
    assert intake._bad_name(name.encode())
    assert not intake._bad_name("\uff21.txt".encode())


@pytest.mark.parametrize("name", ["Makefile", "jupyter_server_config.json", "sub/x.glovebox.yaml"])
def test_names_that_programs_obey(name: str) -> None:
    assert intake._bad_name(name.encode())
    assert not intake._bad_name(b"makefile.csv")

"""xlsx workbooks: the archive's structure, and what its XML parts hold, read as bytes.

Nothing depends on what a part is called, since the workbook itself chooses the names. XML must be plain
(UTF-8, no document type, no CDATA), so that what is searched is what a spreadsheet reads.

Sources: APPNOTE.TXT 4.3 and 4.4; ECMA-376 parts 1 and 2; PyPI's rules for wheels (parser confusion).
"""

from __future__ import annotations

import html
import os
import re
import zipfile

from ..ledger.events import escape
from ..manifest.plan import Outputs
from . import secret_scan
from .findings import CHUNK, Findings

_MOST_ENTRIES = 10_000
_MOST_DIRECTORY = 4 << 20
_MOST_BYTES = 1 << 30
_MOST_RATIO = 200
_OVERLAP = 96 << 10  # a formula has at most 8192 characters, each at most 10 bytes as a reference
_END = 22
_LOCAL = 30
_DESCRIPTOR = 24
_DAMAGED = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError)

_PLAIN_PARTS = (".xml", ".rels", ".vml", ".png", ".jpg", ".jpeg", ".gif", ".bmp")
_PARTS: tuple[tuple[str, str, re.Pattern[bytes]], ...] = (
    ("macro", "holds a program", re.compile(rb"(?i)vbaproject|macroenabled|macrosheet|vba|activex")),
    ("external-link", "links to something outside it",
     re.compile(rb"(?i)externallink|connections\+xml|/connections\.xml|querytable")),
    ("embedded-object", "holds an embedded object", re.compile(rb"(?i)oleobject|/embeddings/|/ctrlprops/")),
)  # fmt: skip
_MARKUP = re.compile(rb"(?i)<!(?:doctype|entity|\[cdata\[)")
_ENCODING = re.compile(rb"<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([^\"']{0,40})")
_OUTSIDE = re.compile(rb"<[^<>]*TargetMode\s*=\s*[\"']\s*External[^<>]*>", re.IGNORECASE)
_FORMULA = re.compile(
    rb"<(?:[\w.-]+:)?(?:f|formula\d?|definedName)(?:\s[^<>]*)?>(.{1,%d}?)</(?:[\w.-]+:)?(?:f|formula\d?|definedName)\s*>"
    % _OVERLAP,
    re.DOTALL,
)
_COMMENT = re.compile(r"<!--.*?-->|<\?.*?\?>", re.DOTALL)
_REACHES = re.compile(
    r"(?i)\b(?:WEBSERVICE|FILTERXML|DDE|RTD|IMAGE|STOCKHISTORY|CALL|REGISTER(?:\.ID)?|EXEC|SQL\.REQUEST|CUBE\w+"
    r"|IMPORT(?:DATA|XML|HTML|FEED|RANGE))\s*\(|[\w']\s*\|.*!"
)
_CLICKS = re.compile(r"(?i)\bHYPERLINK\s*\(|\w+://|\\\\")
_AGAIN = "Write it again."


def xlsx(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Check one workbook."""
    try:
        with zipfile.ZipFile(path) as archive:
            if _structure(archive, path, findings):
                for entry in archive.infolist():
                    _entry(archive, entry, outputs, findings)
    except _DAMAGED as error:
        _damaged(error, findings)
    except Exception as error:  # noqa: BLE001 - zlib.error and whatever else a hostile archive raises
        _damaged(error, findings)


def _damaged(error: Exception, findings: Findings) -> None:
    findings.add("reject", "structure", f"the workbook is damaged: {type(error).__name__}", _AGAIN)


def has_plain_directory(path: str) -> bool:
    """Whether an archive ends with its directory, which is small: to be asked before anything reads it.

    An archive with a comment, with bytes behind it or in the 64-bit form has none.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _END:
            return False
        file.seek(max(0, size - _END - 20))
        tail = file.read()
    end = tail[-_END:]
    if not end.startswith(b"PK\5\6") or tail[:4] == b"PK\6\7":
        return False
    length, start = int.from_bytes(end[12:16], "little"), int.from_bytes(end[16:20], "little")
    count = int.from_bytes(end[10:12], "little")
    return count <= _MOST_ENTRIES and length <= _MOST_DIRECTORY and start + length + _END == size


def _structure(archive: zipfile.ZipFile, path: str, findings: Findings) -> bool:
    """Entries follow each other without overlaps or gaps, once each, and every reader finds the same ones."""
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    packed = os.path.getsize(path)
    if (
        len(entries) > _MOST_ENTRIES
        or total > _MOST_BYTES
        or (total > CHUNK and total > _MOST_RATIO * packed)
    ):
        findings.add("reject", "archive-bomb", "the workbook grows out of proportion when unpacked")
        return False
    if len({entry.filename.casefold() for entry in entries}) != len(entries):
        findings.add("reject", "structure", "two entries have one name", _AGAIN)
        return False
    at = spare = 0
    with open(path, "rb") as file:
        for entry in sorted(entries, key=lambda e: e.header_offset):
            file.seek(entry.header_offset)
            head = file.read(_LOCAL)
            name = file.read(int.from_bytes(head[26:28], "little"))
            if not 0 <= entry.header_offset - at <= spare or not _agrees(head, name, entry):
                where = f"entry {escape(entry.filename)[:80]}"
                findings.add("reject", "structure", "the archive can be read in two ways", _AGAIN, where)
                return False
            extra = int.from_bytes(head[28:30], "little")
            at = entry.header_offset + _LOCAL + len(name) + extra + entry.compress_size
            spare = _DESCRIPTOR if entry.flag_bits & 8 else 0
    if not 0 <= archive.start_dir - at <= spare:
        findings.add("reject", "trailing-data", "the archive holds bytes outside its entries", _AGAIN)
        return False
    return True


def _agrees(head: bytes, name: bytes, entry: zipfile.ZipInfo) -> bool:
    """Whether an entry's own header says what the directory says; no encryption, no rare compression."""
    encoding = "utf-8" if entry.flag_bits & 0x800 else "cp437"
    method = int.from_bytes(head[8:10], "little")
    return (
        head[:4] == b"PK\3\4"
        and method == entry.compress_type
        and method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        and not entry.flag_bits & 1
        and name == entry.orig_filename.encode(encoding)
    )


def _entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, outputs: Outputs, findings: Findings) -> None:
    name = entry.filename
    where = f"entry {escape(name)[:80]}"
    if ".." in name.split("/") or name.startswith("/") or "\\" in name:
        findings.add("reject", "structure", "an entry's name leads out of the archive", _AGAIN, where)
    for code, what, pattern in _PARTS:
        if pattern.search(f"/{name}".encode()):
            findings.add("reject", code, f"the workbook {what}", "Write values only.", where)
    xml = name.lower().endswith((".xml", ".rels", ".vml"))
    if not name.lower().endswith(_PLAIN_PARTS):
        findings.add("review", "embedded-object", "the workbook holds a part that is not looked into",
                     "Write it with openpyxl or xlsxwriter, or have a person look at it.", where)  # fmt: skip
    seen, tail = 0, b""
    with archive.open(entry) as stream:
        while block := stream.read(CHUNK):
            seen += len(block)
            if seen > entry.file_size:
                findings.add("reject", "archive-bomb", "an entry is larger than it says", "", where)
                return
            if xml:
                text = tail + block
                if not _xml(text, where, outputs, findings, begins=seen == len(block)):
                    return
                tail = text[-_OVERLAP:]


def _xml(text: bytes, where: str, outputs: Outputs, findings: Findings, *, begins: bool) -> bool:
    """Search some bytes of a part; False when it cannot be searched as bytes."""
    if begins and not _is_plain(text):
        findings.add("reject", "encoding", "the workbook's XML is not UTF-8", _AGAIN, where)
        return False
    if b"\0" in text or _MARKUP.search(text):
        findings.add(
            "reject", "xml-entities", "the workbook's XML defines entities or hides text", _AGAIN, where
        )
        return False
    if (
        "content_types" in where.lower()
        or "_rels/" in where.lower()
        or b"<Override" in text
        or b"<Relationship" in text
    ):
        # What a part is, is said here, whatever its name.
        words = html.unescape(text.decode("utf-8", "replace")).encode()
        for code, what, pattern in _PARTS:
            if pattern.search(words):
                findings.add("reject", code, f"the workbook {what}", "Write values only.", where)
        for found in _OUTSIDE.finditer(words):
            click = re.search(rb"/hyperlink[\"']", found.group())
            findings.add("review" if click else "reject", "external-link",
                         "the workbook links to an address outside it", "Remove links.", where)  # fmt: skip
    _formulas(text, where, outputs, findings)
    secret_scan.scan(text, outputs, findings, where)
    return True


def _is_plain(text: bytes) -> bool:
    """Whether a part starts as UTF-8 XML."""
    start = text[3:] if text.startswith(b"\xef\xbb\xbf") else text
    declared = _ENCODING.match(start.lstrip())
    encoding = declared.group(1).lower() if declared else b"utf-8"
    return start.lstrip()[:1] == b"<" and encoding in (b"utf-8", b"us-ascii", b"ascii")


def _formulas(text: bytes, where: str, outputs: Outputs, findings: Findings) -> None:
    for found in _FORMULA.finditer(text):
        formula = _COMMENT.sub("", html.unescape(found.group(1).decode("utf-8", "replace")))
        if _REACHES.search(formula):
            findings.add(
                "reject", "formula", "a formula reaches outside the workbook", "Write values.", where
            )
        elif _CLICKS.search(formula):
            findings.add("review", "external-link", "a formula links to an address", "Write values.", where)
        if outputs.formulas == "reject":
            findings.add("reject", "formula", "the workbook holds formulas", "Write values.", where)

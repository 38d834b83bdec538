"""Verdicts on snapshots: type, agreement of name and content, structure, secrets, formulas, expectations.

Every check streams and is bounded; nothing here runs a format's full parser. What this version cannot
check gives `unverified`, never a pass.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..ledger.events import escape
from ..manifest.plan import TYPES, Outputs
from . import identify, intake
from .model import Artifact, Candidate, Reason, Verdict

_ORDER: tuple[Verdict, ...] = ("allow", "fixed", "review", "unverified", "reject")
_CHUNK = 1 << 20
_OVERLAP = 4096
_MOST_LINE = 4 << 20
_MOST_COLUMNS = 50_000
_ZIP_RATIO = 200
_ZIP_ENTRIES = 10_000
_ZIP_BYTES = 1 << 30
_TABLES = ("csv", "tsv")
_TEXTS = ("csv", "tsv", "json", "jsonl", "txt", "md", "html", "svg", "yaml", "ipynb")
_SHALLOW = ("parquet", "arrow", "npy", "npz", "hdf5", "sqlite", "ods", "pdf", "gif", "webp", "zip", "tar", "gz",
            "safetensors", "html", "svg", "ipynb")  # fmt: skip
_ACTIVE = ("html", "svg", "ipynb", "pdf")
_SECRETS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("private key", re.compile(rb"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----")),
    ("AWS access key", re.compile(rb"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])")),
    ("AWS secret key", re.compile(rb"(?i)aws_secret_access_key\s*[=:]\s*\S{20}")),
    (
        "GitHub token",
        re.compile(rb"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50})"),
    ),
    ("Slack token", re.compile(rb"xox[abprs]-[A-Za-z0-9-]{10}")),
    ("Google API key", re.compile(rb"AIza[0-9A-Za-z_-]{35}")),
    ("Stripe key", re.compile(rb"(?:sk|rk)_live_[0-9A-Za-z]{20}")),
    ("API key of a model provider", re.compile(rb"sk-(?:ant-|proj-)?[A-Za-z0-9_-]{32}")),
    ("JSON Web Token", re.compile(rb"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10}")),
    (
        "password in a URL",
        re.compile(rb"[a-z][a-z0-9+]{2,12}://[^/\s:@]{1,64}:[^/\s:@]{3,64}@[A-Za-z0-9.-]{3}"),
    ),
)
_NUMBER = re.compile(r"[-+]?[\d.,'\u2019\s]*\d[\d.,'\u2019\s]*(?:[eE][-+]?\d+)?\s*%?|[-+]")


def verify(candidates: Iterable[Candidate], outputs: Outputs) -> list[Artifact]:
    """A verdict for each candidate.

    Args:
        candidates: from `intake.collect`; a fixed copy replaces the snapshot in place.
        outputs: what may leave.
    """
    return [_verdict(candidate, outputs) for candidate in candidates]


def verify_paths(paths: Iterable[Path], outputs: Outputs) -> list[Artifact]:
    """Verdicts on host files; a folder means its entries. Nothing is promoted or changed.

    Raises:
        OSError: a path cannot be opened.
    """
    found: list[Artifact] = []
    for path in paths:
        folder = path if path.is_dir() and not path.is_symlink() else path.parent
        with tempfile.TemporaryDirectory(prefix="glovebox-verify-") as snapshots:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                only = None if folder == path else path.name
                candidates = intake.collect(
                    fd, Path(snapshots), max_files=outputs.max_files, max_file_size=outputs.max_file_size,
                    max_total_size=outputs.max_total_size, only=only,
                )  # fmt: skip
            finally:
                os.close(fd)
            for artifact in verify(candidates, outputs):
                name = str(path) if only else os.path.join(str(path), artifact.path)
                found.append(_named(artifact, escape(name)))
    return found


def _named(artifact: Artifact, path: str) -> Artifact:
    import msgspec

    return msgspec.structs.replace(artifact, path=path)


class _Findings:
    """Reasons so far and the verdict they add up to."""

    def __init__(self) -> None:
        self.reasons: list[Reason] = []
        self.verdict: Verdict = "allow"

    def add(self, verdict: Verdict, code: str, message: str, remedy: str = "", where: str = "") -> None:
        """Take a finding in; the strictest verdict wins."""
        if len(self.reasons) < 50:
            self.reasons.append(Reason(code=code, where=where, message=message, remedy=remedy))
        if _ORDER.index(verdict) > _ORDER.index(self.verdict):
            self.verdict = verdict


def _verdict(candidate: Candidate, outputs: Outputs) -> Artifact:
    name = escape(candidate.name)
    if candidate.snapshot is None:
        return Artifact(path=name, verdict="reject", reasons=candidate.reasons)
    findings = _Findings()
    kind = identify.identify(candidate.snapshot, candidate.name)
    if kind not in outputs.types:
        allowed = ", ".join(outputs.types) or "none"
        findings.add(
            "reject", "type", f"the content is {kind}, which may not leave (allowed: {allowed})",
            f"Add `{kind}` to outputs.types." if kind in TYPES else "Write another format.",
        )  # fmt: skip
    if not identify.agrees(kind, candidate.name):
        findings.add("reject", "name-type", f"the name says something else than the content, which is {kind}",
                     "Give the file the ending of its content.")  # fmt: skip
    if findings.verdict == "allow":
        _CHECKS.get(kind, _shallow)(candidate.snapshot, kind, outputs, findings)
        _secrets(candidate.snapshot, kind, outputs, findings)
        _expectations(candidate, kind, outputs, findings)
    size, digest = candidate.size, candidate.sha256
    if findings.verdict == "fixed":
        size, digest = _digest(candidate.snapshot)
    return Artifact(
        path=name,
        verdict=findings.verdict,
        type=kind,
        bytes=size,
        sha256=digest,
        reasons=tuple(findings.reasons),
    )


def _digest(path: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for block in _blocks(path):
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def _blocks(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_CHUNK):
            yield block


# -- per type -----------------------------------------------------------------------------------


def _shallow(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    """Types whose inside this version does not look into."""
    if kind in _ACTIVE:
        findings.add("review", "active-content", f"{kind} can hold scripts and remote resources, which are not checked",
                     "Have a person look at it.")  # fmt: skip
    elif kind in _SHALLOW:
        findings.add("unverified", "not-inspected", f"this version cannot look inside {kind}",
                     "Write csv, xlsx, json, txt or png, or have a person look at it.")  # fmt: skip


def _png(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    """Chunks from signature to IEND, and nothing behind it (PNG specification, 5.3)."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        at = 8
        for _ in range(100_000):
            file.seek(at)
            head = file.read(8)
            length = int.from_bytes(head[:4], "big")
            if len(head) < 8 or at + 12 + length > size:
                findings.add("reject", "structure", "the image is cut off or damaged", "Write it again.")
                return
            at += 12 + length
            if head[4:] == b"IEND":
                break
        if at != size:
            findings.add(
                "reject", "trailing-data", f"{size - at} bytes lie behind the image's end", "Write it again."
            )


def _jpeg(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - 2))
        if file.read(2) != b"\xff\xd9":
            findings.add(
                "reject", "trailing-data", "the image does not end where its data ends", "Write it again."
            )


def _xlsx(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    """The archive's directory: macros, links to elsewhere, size when unpacked, formulas."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            total = sum(entry.file_size for entry in entries)
            packed = os.path.getsize(path)
            if (
                len(entries) > _ZIP_ENTRIES
                or total > _ZIP_BYTES
                or (total > _CHUNK and total > _ZIP_RATIO * packed)
            ):
                findings.add("reject", "archive-bomb", "the workbook grows out of proportion when unpacked")
                return
            for entry in entries:
                _xlsx_entry(archive, entry, outputs, findings)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        findings.add(
            "reject", "structure", f"the workbook is damaged: {type(error).__name__}", "Write it again."
        )
    except Exception as error:  # noqa: BLE001 - zlib.error and what else a hostile archive can raise
        findings.add(
            "reject", "structure", f"the workbook is damaged: {type(error).__name__}", "Write it again."
        )


def _xlsx_entry(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, outputs: Outputs, findings: _Findings
) -> None:
    name = entry.filename.lower()
    where = f"entry {escape(entry.filename)[:80]}"
    if "vbaproject" in name or name.endswith((".bin", ".exe", ".dll", ".vbs", ".js")):
        findings.add("reject", "macro", "the workbook holds a program", "Save it without macros.", where)
    elif "externallink" in name or "/connections" in name or "querytable" in name:
        findings.add(
            "reject", "external-link", "the workbook links to something outside it", "Remove it.", where
        )
    elif "/embeddings/" in name or "activex" in name:
        findings.add(
            "reject", "embedded-object", "the workbook holds an embedded object", "Remove it.", where
        )
    elif ".." in name.split("/") or name.startswith("/"):
        findings.add(
            "reject", "structure", "an entry's name leads out of the archive", "Write it again.", where
        )
    if name.endswith((".xml", ".rels")):
        seen, tail = 0, b""
        with archive.open(entry) as stream:
            while block := stream.read(_CHUNK):
                seen += len(block)
                if seen > entry.file_size or seen > _ZIP_BYTES:
                    findings.add("reject", "archive-bomb", "an entry is larger than it says", "", where)
                    return
                _xlsx_text(tail + block, name, where, outputs, findings)
                tail = block[-_OVERLAP:]


def _xlsx_text(text: bytes, name: str, where: str, outputs: Outputs, findings: _Findings) -> None:
    codes = {reason.code for reason in findings.reasons}
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        findings.add(
            "reject", "xml-entities", "the workbook's XML defines entities", "Write it again.", where
        )
    if name.endswith(".rels") and b'TargetMode="External"' in text and "external-link" not in codes:
        findings.add(
            "review", "external-link", "the workbook links to an address outside it", "Remove links.", where
        )
    if "worksheets/" in name and re.search(rb"<f[ >]", text) and "formula" not in codes:
        if re.search(rb"(?i)(WEBSERVICE|HYPERLINK|DDE|FILTERXML|IMPORTDATA|CALL|REGISTER\.ID|cmd\|)", text):
            findings.add(
                "reject", "formula", "a formula reaches outside the workbook", "Write values.", where
            )
        elif outputs.formulas == "reject":
            findings.add("reject", "formula", "the workbook holds formulas", "Write values.", where)
    if name.endswith(("sharedstrings.xml",)) or "worksheets/" in name:
        _secret_in(text, outputs, findings, where)


def _table(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    """Text tables: bounded lines and columns, and cells that a spreadsheet would run."""
    if not _plain_text(path, findings):
        return
    delimiter = "\t" if kind == "tsv" else _delimiter(path)
    risky, first = 0, ""
    for number, row in enumerate(_rows(path, delimiter, findings), 1):
        for cell in row:
            if _runs(cell):
                risky += 1
                first = first or f"line {number}"
    if not risky or outputs.formulas == "allow":
        return
    message = f"{risky} cell{'s start' if risky > 1 else ' starts'} like a formula"
    if outputs.formulas == "reject":
        findings.add("reject", "formula", message, "Write values that do not start with = + - or @.", first)
    elif findings.verdict == "allow":
        _neutralise(path, delimiter, findings)
        findings.add("fixed", "formula", f"{message}; they now start with an apostrophe", "", first)


def _runs(cell: str) -> bool:
    """Whether a spreadsheet would run a cell's text (OWASP, CSV injection); numbers do not count."""
    text = cell.lstrip(" \"'\ufeff") if cell[:1] in (" ", "\ufeff") else cell
    return text[:1] in (
        "=",
        "+",
        "-",
        "@",
        "\t",
        "\r",
        "\uff1d",
        "\uff0b",
        "\uff0d",
        "\uff20",
    ) and not _NUMBER.fullmatch(text)


def _delimiter(path: str) -> str:
    with open(path, "rb") as file:
        first = file.readline(1 << 16)
    return max(",;\t|", key=lambda d: first.count(d.encode())) if first.strip() else ","


def _rows(path: str, delimiter: str, findings: _Findings) -> Iterator[list[str]]:
    csv.field_size_limit(_MOST_LINE)
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        try:
            for row in csv.reader(file, delimiter=delimiter):
                if len(row) > _MOST_COLUMNS:
                    findings.add("reject", "structure", f"a row has more than {_MOST_COLUMNS} columns")
                    return
                yield row
        except csv.Error as error:
            findings.add("reject", "structure", f"the table cannot be read: {error}", "Write it again.")


def _neutralise(path: str, delimiter: str, findings: _Findings) -> None:
    """Replace the snapshot by a copy in which no cell runs. Numbers stay as they are."""
    fixed = f"{path}.fixed"
    with open(fixed, "x", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
        for row in _rows(path, delimiter, findings):
            writer.writerow(["'" + cell if _runs(cell) else cell for cell in row])
    os.replace(fixed, path)


def _text(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    _plain_text(path, findings)


def _json(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    """Whole JSON documents, by a parser that is safe against depth and size."""
    import msgspec

    if not _plain_text(path, findings):
        return
    try:
        if kind == "json":
            msgspec.json.decode(Path(path).read_bytes())
            return
        with open(path, "rb") as file:
            while line := file.readline(_MOST_LINE):
                if line.strip():
                    msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        findings.add(
            "reject", "structure", f"this is not {kind}: {escape(str(error))[:120]}", "Write it again."
        )


def _plain_text(path: str, findings: _Findings) -> bool:
    """UTF-8 without NUL, escape and other control characters, and with bounded lines."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 0
    try:
        for block in _blocks(path):
            decoder.decode(block)
            if _CONTROL.search(block):
                findings.add(
                    "reject", "control-characters", "the text has control characters", "Write plain text."
                )
                return False
            parts = block.split(b"\n")
            line = line + len(parts[0]) if len(parts) == 1 else len(parts[-1])
            if line > _MOST_LINE:
                findings.add("reject", "structure", f"a line is longer than {_MOST_LINE} bytes", "Break it.")
                return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        findings.add("reject", "encoding", "the text is not UTF-8", "Write it with encoding='utf-8'.")
        return False
    return True


_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_CHECKS: dict[str, Callable[[str, str, Outputs, _Findings], None]] = {
    "png": _png, "jpeg": _jpeg, "xlsx": _xlsx, "csv": _table, "tsv": _table, "json": _json, "jsonl": _json,
    "txt": _text, "md": _text, "yaml": _text,
}  # fmt: skip


# -- secrets and expectations -------------------------------------------------------------------


def _secrets(path: str, kind: str, outputs: Outputs, findings: _Findings) -> None:
    if outputs.secrets == "allow":
        return
    tail = b""
    for block in _blocks(path):
        _secret_in(tail + block, outputs, findings, "")
        tail = block[-_OVERLAP:]


def _secret_in(text: bytes, outputs: Outputs, findings: _Findings, where: str) -> None:
    if outputs.secrets == "allow":
        return
    known = {reason.message for reason in findings.reasons}
    for name, pattern in _SECRETS:
        message = f"the file holds what looks like a secret: {name}"
        if message not in known and pattern.search(text):
            findings.add(
                "reject" if outputs.secrets == "reject" else "review",
                "secret", message, "Remove it from the data.", where,
            )  # fmt: skip


def _expectations(candidate: Candidate, kind: str, outputs: Outputs, findings: _Findings) -> None:
    expected = outputs.expect.get(candidate.name)
    if expected is None or candidate.snapshot is None:
        return
    if not isinstance(expected, dict) or kind not in _TABLES:
        findings.add("unverified", "expectation", f"expectations for {kind} cannot be checked in this version",
                     "Expect columns and min_rows of csv or tsv files.")  # fmt: skip
        return
    for name in sorted(set(expected) - {"columns", "min_rows"}):
        findings.add("unverified", "expectation", f"`{escape(str(name))}` cannot be checked in this version")
    rows = _rows(candidate.snapshot, "\t" if kind == "tsv" else _delimiter(candidate.snapshot), findings)
    header = next(rows, [])
    columns = expected.get("columns", {})
    names = list(columns) if isinstance(columns, dict | list) else []
    if names and header != names:
        found, wanted = (escape(", ".join(map(str, part)))[:200] for part in (header, names))
        message = f"the columns are {found}; expected were {wanted}"
        findings.add("reject", "columns", message, "Correct the table or `expect`.", "line 1")
        return
    count = _check_rows(rows, columns if isinstance(columns, dict) else {}, header, findings)
    least = expected.get("min_rows", 0)
    if isinstance(least, int) and count < least:
        findings.add("reject", "rows", f"{count} rows; at least {least} are expected", "Check the notebook.")


def _check_rows(
    rows: Iterator[list[str]], columns: dict[str, Any], header: list[str], findings: _Findings
) -> int:
    """Count rows and compare each typed column; an empty cell fits every type."""
    numbers = [n for n, name in enumerate(header) if columns.get(name) in ("number", "integer")]
    whole = {n for n in numbers if columns.get(header[n]) == "integer"}
    for name, kind in columns.items():
        if kind not in ("string", "number", "integer"):
            findings.add(
                "unverified",
                "expectation",
                f"the column type {escape(str(kind))} of {escape(name)} is unknown",
            )
    count = wrong = 0
    for row in rows:
        count += 1
        if len(row) != len(header):
            wrong += 1
            if wrong == 1:
                findings.add(
                    "reject", "columns", "a row has another number of cells", "", f"line {count + 1}"
                )
            continue
        for n in numbers:
            text = row[n].strip()
            if text and not (re.fullmatch(r"[-+]?\d+", text) if n in whole else _is_number(text)):
                wrong += 1
                if wrong == 1:
                    message = f"{escape(header[n])} holds {escape(text)[:40]!r}, which is no number"
                    findings.add("reject", "column-type", message, "Clean the column.", f"line {count + 1}")
    return count


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

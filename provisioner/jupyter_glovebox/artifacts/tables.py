"""Text tables: bounded rows, cells that a spreadsheet would run, and what the manifest expects of them.

A table is judged as its own separator splits it, and also as comma, semicolon and tab would, since
spreadsheets choose the separator by the reader's language.

Sources: RFC 4180; OWASP, "CSV Injection"; Python csv.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..ledger.events import escape
from ..manifest.plan import Outputs
from .findings import Findings, blocks
from .texts import MOST_LINE, plain

_MOST_COLUMNS = 50_000
_BATCH = 2000
_OTHERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_SIGNS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace()) + "\ufeff\u200b"
_STARTS = frozenset((*_SIGNS, *_BLANKS))
_LONGEST_NUMBER = 64  # also keeps the expression below from running long
_NUMBER = re.compile(
    r"[-+]?(?:[\d.,'\u2019\s]*\d[\d.,'\u2019\s]*(?:[eE]\s*[-+]?\s*\d[\d\s]*)?%?\s*|inf|infinity|nan)|[-+\s]+",
    re.IGNORECASE,
)
# A call of a function, or the form of a DDE link: without one a formula only counts with cells.
_ACTS = re.compile(r"[\w.]\(|\|.*!", re.DOTALL)

# The same questions put to bytes, where "no" is certain and "yes" sends us to the cells. Each byte becomes
# its part in the question (S separator or quote, X sign, M minus or plus, d digit); blanks vanish.
_PARTS = {
    delimiter: bytes.maketrans(f'{delimiter}\n\r"=@+-0123456789SXMd'.encode(), b"SSSSXXMMdddddddddd____")
    for delimiter in ",;\t|"
}
_VANISH = {delimiter: b" \x0b\x0c" + (b"" if delimiter == "\t" else b"\t") for delimiter in ",;\t|"}
_MINUS = re.compile(rb"SM(?![.,]*d[d.,]*(?:[eE]M?d+)?S)")
_WIDE_BLANK = re.compile(
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2(?:\x80[\x80-\x8b\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80|\xef\xbb\xbf"
)
_ACTS_BYTES = re.compile(rb"[\w.\x80-\xff]\(|\|")


class _Read(NamedTuple):
    """How a table is split, and whether it starts with a byte order mark."""

    delimiter: str
    mark: bool


def table(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Check a csv or tsv file; with `formulas: neutralise` a fixed copy may replace the snapshot."""
    if not plain(path, findings):
        return
    read = _how(path, kind, findings)
    if read is not None and any(b'"' in block for block in blocks(path)):
        for _ in _rows(path, read, findings):
            pass
    if read is None or findings.verdict == "reject" or outputs.formulas == "allow":
        return
    may_run, may_act = _quick_look(path, read.delimiter)
    if not may_run and not may_act:
        return
    risky, first = _count(path, read, acting=False) if may_run else (0, "")
    if outputs.formulas == "reject":
        if risky:
            findings.add(
                "reject", "formula", _said(risky), "Write values that do not start with = + - or @.", first
            )
        elif may_act:
            _other_readings(path, read, "reject", findings)
        return
    fixed = _neutralised(path, read, findings) if risky else path
    if may_act:
        _other_readings(fixed, read, "review", findings)
    if risky and findings.verdict == "allow":
        os.replace(fixed, path)
        starts = "it now starts" if risky == 1 else "they now start"
        findings.add("fixed", "formula", f"{_said(risky)}; {starts} with an apostrophe", "", first)
    elif risky:
        os.unlink(fixed)


def _said(count: int) -> str:
    return "1 cell starts like a formula" if count == 1 else f"{count} cells start like a formula"


def runs(cell: str) -> bool:
    """Whether a spreadsheet would run a cell's text; numbers do not count."""
    text = cell.lstrip(_BLANKS)
    if not text.startswith(_SIGNS):
        return False
    if len(text) > _LONGEST_NUMBER:
        return True
    return not _NUMBER.fullmatch(text.replace("\ufeff", "").replace("\u200b", "").rstrip())


def _quick_look(path: str, delimiter: str) -> tuple[bool, bool]:
    """Whether a cell can start with a sign, and whether one can act under another reading."""
    may_run = may_act = quoted = False
    for text in _whole_lines(path):
        quoted = quoted or b'"' in text
        may_run = may_run or _can_run(text, delimiter, quoted=quoted)
        may_act = may_act or bool((b"(" in text or b"|" in text) and _ACTS_BYTES.search(text))
        if may_run and may_act:
            break
    return may_run, may_act


def _can_run(text: bytes, delimiter: str, *, quoted: bool) -> bool:
    """`quoted`: a quote stands here or before, so that a separator need not end a cell, nor a number."""
    if not text.isascii():
        if b"\xef\xbc" in text:  # signs of full width
            return True
        text = _WIDE_BLANK.sub(b" ", text)
    parts = b"S" + text.translate(_PARTS[delimiter], _VANISH[delimiter])
    return b"SX" in parts or (b"SM" in parts if quoted else _MINUS.search(parts) is not None)


def _whole_lines(path: str) -> Iterator[bytes]:
    """The file in pieces that end with a line, so that no cell is cut; the last one ends where the file does."""
    rest = b""
    for block in blocks(path):
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
    if rest:
        yield rest + b"\n"


def _how(path: str, kind: str, findings: Findings) -> _Read | None:
    """The separator, from the first line; None when it tells spreadsheets to split at something else."""
    with open(path, "rb") as file:
        first = file.readline(1 << 16)
    mark = first.startswith(b"\xef\xbb\xbf")
    first = first[3:] if mark else first
    if told := re.match(rb"[\"']?sep=(.)", first, re.IGNORECASE):
        if told.group(1) in (b",", b";", b"\t", b"|"):
            return _Read(told.group(1).decode(), mark)
        findings.add("reject", "structure", "the first line sets an unusual separator for spreadsheets",
                     "Remove the line that starts with sep=.")  # fmt: skip
        return None
    if kind == "tsv":
        return _Read("\t", mark)
    return _Read(max(",;\t|", key=lambda d: first.count(d.encode())), mark)


class _Lines:
    """Lines of text for the csv reader. A row may cross lines, but not without bound."""

    def __init__(self, path: str, mark: bool) -> None:
        self._path = path
        self._encoding = "utf-8-sig" if mark else "utf-8"
        self.pending = 0

    def __iter__(self) -> Iterator[str]:
        with open(self._path, encoding=self._encoding, errors="replace", newline="") as file:
            for line in file:
                self.pending += len(line)
                if self.pending > MOST_LINE:
                    raise csv.Error(f"a row is longer than {MOST_LINE} characters")
                yield line


def _rows(path: str, read: _Read, findings: Findings | None) -> Iterator[list[str]]:
    """The rows. With `findings` quotes must be right; without, a table is read as far as it can be."""
    csv.field_size_limit(MOST_LINE)
    lines = _Lines(path, read.mark)
    try:
        for row in csv.reader(lines, delimiter=read.delimiter, strict=findings is not None):
            lines.pending = 0
            if len(row) > _MOST_COLUMNS:
                raise csv.Error(f"a row has more than {_MOST_COLUMNS} columns")
            yield row
    except csv.Error as error:
        if findings is not None:
            findings.add("reject", "structure", f"the table cannot be read: {error}", "Write it again.")


def _count(path: str, read: _Read, *, acting: bool) -> tuple[int, str]:
    """How many cells run (and, if asked so, can act), and where the first one is."""
    risky, first = 0, ""
    for number, row in enumerate(_rows(path, read, None), 1):
        for cell in row:
            if cell and cell[0] in _STARTS and runs(cell) and (not acting or _ACTS.search(cell)):
                risky += 1
                first = first or f"line {number}"
    return risky, first


def _other_readings(path: str, read: _Read, verdict: Any, findings: Findings) -> None:
    """Cells that appear only when a spreadsheet splits the lines elsewhere."""
    for delimiter, name in _OTHERS.items():
        if delimiter != read.delimiter:
            risky, first = _count(path, read._replace(delimiter=delimiter), acting=True)
            if risky:
                findings.add(
                    verdict, "formula", f"split at {name}, as some spreadsheets do, {_said(risky)}",
                    "Write no text with a separator followed by = + - or @.", first,
                )  # fmt: skip


def _neutralised(path: str, read: _Read, findings: Findings) -> str:
    """Write a copy in which no cell runs; its path. Numbers stay as they are."""
    fixed = f"{path}.fixed"
    with open(fixed, "x", encoding="utf-8-sig" if read.mark else "utf-8", newline="") as out:
        writer = csv.writer(out, delimiter=read.delimiter, lineterminator="\n")
        for row in _rows(path, read, findings):
            writer.writerow(["'" + cell if runs(cell) else cell for cell in row])
    return fixed


# -- what the manifest expects ------------------------------------------------------------------


def expected(path: str, kind: str, expect: dict[str, Any], findings: Findings) -> None:
    """Compare a table with its part of `outputs.expect`: columns, their types, the least number of rows."""
    for name in sorted(set(map(str, expect)) - {"columns", "min_rows"}):
        findings.add("unverified", "expectation", f"`{escape(name)}` cannot be checked in this version")
    read = _how(path, kind, findings)
    if read is None:
        return
    header = next(_rows(path, read, findings), [])
    columns = expect.get("columns", {})
    names = list(columns) if isinstance(columns, dict | list) else []
    if names and header != names:
        found, wanted = (escape(", ".join(map(str, part)))[:200] for part in (header, names))
        message = f"the columns are {found}; expected were {wanted}"
        findings.add("reject", "columns", message, "Correct the table or `expect`.", "line 1")
        return
    columns = columns if isinstance(columns, dict) else {}
    for name, column in columns.items():
        if column not in ("string", "number", "integer"):
            message = f"the column type {escape(str(column))} of {escape(str(name))} is unknown"
            findings.add("unverified", "expectation", message, "Use string, number or integer.")
    count = _Rows(header, columns, findings).check(path, read)
    least = expect.get("min_rows", 0)
    if isinstance(least, int) and count < least:
        findings.add("reject", "rows", f"{count} rows; at least {least} are expected", "Check the notebook.")


class _Rows:
    """Compares rows with the header and the column types. An empty cell fits every type, an empty line is none."""

    def __init__(self, header: list[str], columns: dict[str, Any], findings: Findings) -> None:
        self._header = header
        kinds = [(n, str(columns.get(name))) for n, name in enumerate(header)]
        self._typed = [(n, kind) for n, kind in kinds if kind in ("number", "integer")]
        self._findings = findings
        self._told = False
        self._count = -1  # the header

    def check(self, path: str, read: _Read) -> int:
        """Go through a table; the number of its rows. The first fault of all is reported."""
        if any(b'"' in block or b"\r" in block for block in blocks(path)):
            rows = _rows(path, read, self._findings)
            while batch := list(itertools.islice(rows, _BATCH)):
                self._add([row for row in batch if row])
        else:
            for text in _whole_lines(path):
                self._add_lines(
                    [line for line in text.decode("utf-8-sig").split("\n") if line], read.delimiter
                )
        return max(self._count, 0)

    def _add_lines(self, lines: list[str], delimiter: str) -> None:
        """Lines without quotes, column by column; row by row where that is not enough."""
        width = len(self._header)
        if not self._told and {line.count(delimiter) for line in lines} <= {width - 1} and self._count >= 0:
            cells = delimiter.join(lines).split(delimiter)
            if all(_ALL[kind](cells[n::width]) for n, kind in self._typed):
                self._count += len(lines)
                return
        self._add([line.split(delimiter) for line in lines])

    def _add(self, rows: list[list[str]]) -> None:
        if self._count < 0 and rows:
            self._count, rows = 0, rows[1:]
        if not self._told and rows:
            self._told = self._is_wrong(rows, self._count + 1)
        self._count += len(rows)

    def _is_wrong(self, rows: list[list[str]], first: int) -> bool:
        width = len(self._header)
        for at, row in enumerate(rows):
            where = f"row {first + at} below the header"
            if len(row) != width:
                message = f"a row has {len(row)} cells, the header has {width}"
                self._findings.add("reject", "columns", message, "Write every row with all columns.", where)
                return True
            for n, kind in self._typed:
                if not _ALL[kind]([row[n]]):
                    name, cell = escape(self._header[n]), escape(row[n].strip())[:40]
                    message = f"{name} holds {cell!r}, which is no {kind}"
                    self._findings.add("reject", "column-type", message, "Clean the column.", where)
                    return True
        return False


def _numbers(cells: list[str], read: Callable[[str], object]) -> bool:
    """Whether every cell that is not empty is a number; an underscore is Python's own."""
    try:
        for _ in map(read, filter(str.strip, cells)):
            pass
    except ValueError:
        return False
    return "_" not in "".join(cells)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


_ALL: dict[str, Callable[[list[str]], bool]] = {
    "number": lambda cells: _numbers(cells, float),
    "integer": lambda cells: _digits("".join(cells)) or _numbers(cells, int),
}

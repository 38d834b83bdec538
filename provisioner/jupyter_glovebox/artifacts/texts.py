"""Plain text and JSON: UTF-8 that no terminal, editor or parser reads in a second way, in bounded lines.

Sources: RFC 3629, RFC 8259, ECMA-48 (control functions), Unicode Technical Report 36 (bidirectional text).
"""

from __future__ import annotations

import codecs
import mmap
import os
import re

from ..ledger.events import escape
from ..manifest.plan import Outputs
from .findings import Findings, blocks

MOST_LINE = 4 << 20
_HARMLESS = bytes(sorted({*range(0x20, 0x7F), *range(0x80, 0x100), *b"\t\n\f\r"}))
# The C1 characters that begin a terminal's control sequence: DCS, CSI, OSC.
_SEQUENCES = re.compile(rb"\xc2[\x90\x9b\x9d]")
# U+202A..U+202E and U+2066..U+2069 show text in another order than programs read it.
_TURNING = re.compile(rb"\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")


def text(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Any plain text."""
    plain(path, findings)


def json(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Whole JSON documents. They are walked, not built, so memory does not grow with them."""
    import msgspec

    # A whole document is one line as often as not; it is never read by lines.
    if not plain(path, findings, by_lines=kind != "json"):
        return
    try:
        if os.path.getsize(path) == 0 and kind == "json":
            raise ValueError("it is empty")
        if kind == "json":
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                msgspec.json.decode(data, type=msgspec.Raw)
            return
        with open(path, "rb") as file:
            while line := file.readline(MOST_LINE + 1):
                if line.strip():
                    msgspec.json.decode(line, type=msgspec.Raw)
    except (ValueError, RecursionError) as error:  # msgspec's DecodeError is a ValueError
        remedy = "Write it again."
        if any(word in block for block in blocks(path) for word in (b"NaN", b"Infinity")):
            remedy = "JSON has no NaN and no Infinity: write null instead."
        findings.add("reject", "structure", f"this is not {kind}: {escape(str(error))[:120]}", remedy)


def plain(path: str, findings: Findings, *, by_lines: bool = True) -> bool:
    """UTF-8 without NUL, escape and other control characters, with bounded lines; whether it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, tail = 0, b""
    try:
        for block in blocks(path):
            control = bool(block.translate(None, _HARMLESS))
            if tail or not block.isascii():
                decoder.decode(block)
                joined = tail + block
                control = control or _SEQUENCES.search(joined) is not None
                if _TURNING.search(joined):
                    findings.add(
                        "review", "bidi", "characters turn the direction of the text around",
                        "Remove U+202A to U+202E and U+2066 to U+2069, or have a person look at it.",
                    )  # fmt: skip
            if control:
                findings.add(
                    "reject", "control-characters", "the text has control characters", "Write plain text."
                )
                return False
            tail = block[-2:] if block[-1] >= 0x80 else b""  # a character cut by the border
            line = _line_length(block, line)
            if by_lines and line > MOST_LINE:
                findings.add("reject", "structure", f"a line is longer than {MOST_LINE} bytes", "Break it.")
                return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        findings.add("reject", "encoding", "the text is not UTF-8", "Write it with encoding='utf-8'.")
        return False
    return True


def _line_length(block: bytes, line: int) -> int:
    """The length of the line that the block ends in, or of the one it starts with when that is too long."""
    first = block.find(b"\n")
    line += len(block) if first < 0 else first
    # A line inside one block is shorter than the block, so shorter than the bound.
    return line if first < 0 or line > MOST_LINE else len(block) - block.rfind(b"\n") - 1

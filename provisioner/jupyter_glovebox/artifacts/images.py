"""Images whose structure is walked to their end, so that nothing hides behind or beside the picture.

Sources: PNG specification (third edition), 5.3 and 11; ITU-T T.81, annex B; APPNOTE.TXT 4.3.16.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib

from ..manifest.plan import Outputs
from .findings import Findings

_MOST_PIXELS = 200_000_000
_MOST_CHUNKS = 100_000
_MOST_NOTE = 64 << 10
_CHUNKS = frozenset(
    b"IHDR PLTE IDAT IEND tRNS cHRM gAMA iCCP sBIT sRGB cICP mDCV cLLI tEXt zTXt iTXt bKGD hIST pHYs sPLT eXIf "
    b"tIME acTL fcTL fdAT oFFs pCAL sCAL".split()
)
_NOTES = (b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"sPLT", b"hIST", b"pCAL", b"sCAL")
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_ZIP_END = 22
_REMEDY = "Write it again."


def png(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Chunks from signature to IEND, all of known types and whole, and nothing behind them."""
    size, at = os.path.getsize(path), 8
    with open(path, "rb") as file:
        for number in range(_MOST_CHUNKS):
            file.seek(at)
            head = file.read(8)
            length, name = int.from_bytes(head[:4], "big"), head[4:]
            if len(head) < 8 or at + 12 + length > size or (number == 0) != (name == b"IHDR"):
                findings.add("reject", "structure", "the image is cut off or damaged", _REMEDY)
                return
            if name not in _CHUNKS or (name in _NOTES and length > _MOST_NOTE):
                findings.add("reject", "structure", "the image has a part that no picture needs", _REMEDY)
                return
            body = file.read(length)
            if zlib.crc32(body, zlib.crc32(name)) != int.from_bytes(file.read(4), "big"):
                findings.add("reject", "structure", "the image is damaged: a checksum is wrong", _REMEDY)
                return
            if number == 0 and _too_large(body, findings):
                return
            at += 12 + length
            if name == b"IEND":
                _ends(path, at, size, findings)
                return
    findings.add("reject", "structure", f"the image has more than {_MOST_CHUNKS} parts", _REMEDY)


def _too_large(header: bytes, findings: Findings) -> bool:
    pixels = int.from_bytes(header[:4], "big") * int.from_bytes(header[4:8], "big")
    if len(header) == 13 and 0 < pixels <= _MOST_PIXELS:
        return False
    findings.add("reject", "archive-bomb", f"the image claims {pixels} pixels", "Write a smaller image.")
    return True


def jpeg(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Segments and scans up to the first end of image, and nothing behind it."""
    size = os.path.getsize(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, scans = 2, 0
        while at + 2 <= size and data[at] == 0xFF:
            marker = data[at + 1]
            at += 2
            if marker == 0xFF:  # a fill byte
                at -= 1
            elif marker == 0xD9 and scans:
                _ends(path, at, size, findings)
                return
            elif marker == 0xD9:
                break
            elif marker != 0x01 and not 0xD0 <= marker <= 0xD8:
                at += max(2, int.from_bytes(data[at : at + 2], "big"))
                if marker == 0xDA:
                    scans += 1
                    found = _MARKER.search(data, at)
                    at = found.start() if found else size
    findings.add("reject", "structure", "the image is cut off or damaged", _REMEDY)


def _ends(path: str, at: int, size: int, findings: Findings) -> None:
    if at != size:
        findings.add("reject", "trailing-data", f"{size - at} bytes lie behind the image's end", _REMEDY)
    elif is_zip_too(path):
        findings.add("reject", "trailing-data", "the image is an archive as well", _REMEDY)


def is_zip_too(path: str) -> bool:
    """Whether a ZIP reader would find an archive's end record, which may stand 64 KiB before the end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _ZIP_END - 0xFFFF))
        tail = file.read()
    at = tail.find(b"PK\5\6")
    while at >= 0:
        # Readers accept a comment that runs on to the very end.
        if at + _ZIP_END + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail):
            return True
        at = tail.find(b"PK\5\6", at + 1)
    return False

"""What a file is, by its content. Reads at most its first 64 KiB and its last bytes.

Sources: the formats' own specifications (PNG, JFIF, PDF 32000-1, APPNOTE.TXT, RFC 8259, RFC 4180, …).
"""

from __future__ import annotations

import json
import os
import zipfile

from .workbook import has_plain_directory

HEAD = 1 << 16
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"%PDF-", "pdf"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\x93NUMPY", "npy"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"SQLite format 3\0", "sqlite"),
    (b"\x1f\x8b", "gz"),
    (b"\x7fELF", "elf"),
    (b"MZ", "exe"),
    (b"\xca\xfe\xba\xbe", "macho"),
    (b"\xcf\xfa\xed\xfe", "macho"),
    (b"#!", "script"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!\x1a\x07", "rar"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "ole"),
)
SUFFIXES: dict[str, tuple[str, ...]] = {
    "jpeg": (".jpg", ".jpeg"), "txt": (".txt", ".log"), "jsonl": (".jsonl", ".ndjson"), "hdf5": (".h5", ".hdf5"),
    "arrow": (".arrow", ".feather"), "sqlite": (".sqlite", ".sqlite3", ".db"), "yaml": (".yaml", ".yml"),
    "html": (".html", ".htm"), "gz": (".gz",), "md": (".md",),
}  # fmt: skip
_TEXT_SUFFIXES = {
    suffix: kind
    for kind in ("csv", "tsv", "json", "jsonl", "txt", "md", "html", "svg", "yaml", "ipynb")
    for suffix in SUFFIXES.get(kind, (f".{kind}",))
}


def identify(path: str, name: str) -> str:
    """The content type of a file; among kinds of plain text the name's ending chooses.

    Args:
        path: the bytes.
        name: the name the file wants outside; only its ending is looked at.

    Returns:
        A type name as in `outputs.types`, or one that no manifest can allow (`elf`, `script`, `unknown`).
    """
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_kind(path)
    if len(head) > 262 and head[257:262] == b"ustar":
        return "tar"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and head.rstrip().endswith(b"."):
        return "pickle"
    if len(head) >= 10 and int.from_bytes(head[:8], "little") < os.path.getsize(path) and head[8:9] == b"{":
        return "safetensors"
    return _text_kind(head, os.path.splitext(name)[1].lower())


def _zip_kind(path: str) -> str:
    if not has_plain_directory(path):
        return "zip"  # a directory that hides, or that is too large to be read
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()[:2000]]
            if "[Content_Types].xml" in names and any(n.startswith("xl/") for n in names):
                return "xlsx"
            small = names[:1] == ["mimetype"] and archive.getinfo("mimetype").file_size < 200
            if small and b"opendocument.spreadsheet" in archive.read("mimetype"):
                return "ods"
            if names and all(n.endswith(".npy") for n in names):
                return "npz"
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, NotImplementedError, RuntimeError):
        return "unknown"
    return "zip"


def _text_kind(head: bytes, suffix: str) -> str:
    if b"\0" in head:
        return "unknown"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or len(head) < HEAD:
            return "unknown"  # a cut character at the end of the head is no fault
        text = head[: error.start].decode("utf-8")
    start = text.lstrip("\ufeff \t\r\n")[:512].lower()
    if start.startswith("<svg") or (start.startswith("<?xml") and "<svg" in start):
        return "svg"
    if start.startswith(("<!doctype html", "<html", "<script", "<head", "<body", "<iframe", "<?xml")):
        return "html"
    kind = _TEXT_SUFFIXES.get(suffix)
    if kind == "html" and start.startswith("<"):
        return "html"  # a part of a page, as DataFrame.to_html writes it
    if (
        kind in ("json", "ipynb")
        and start
        and not start.startswith(("{", "[", '"', "-", "t", "f", "n", *"0123456789"))
    ):
        return "txt"
    if kind == "ipynb" and not _is_notebook(text):
        return "json"
    return kind if kind not in (None, "html", "svg") else "txt"


def _is_notebook(text: str) -> bool:
    if '"nbformat"' in text:
        return True
    try:
        return "cells" in json.loads(text)
    except (ValueError, RecursionError):
        return True  # longer than the head: the name's word stands


def agrees(kind: str, name: str) -> bool:
    """Whether a name's ending says what the content is."""
    suffix = os.path.splitext(name)[1].lower()
    if kind == "txt" and suffix in ("", ".txt", ".log", ".text"):
        return True
    return suffix in SUFFIXES.get(kind, (f".{kind}",))

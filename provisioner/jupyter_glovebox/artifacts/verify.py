"""Verdicts on snapshots: type, agreement of name and content, structure, secrets, formulas, expectations.

Every check streams and is bounded; nothing here runs a format's full parser. What this version cannot
check gives `unverified`, never a pass, and so does a check that fails.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ..ledger.events import escape
from ..manifest.plan import TYPES, Outputs
from . import identify, images, intake, secret_scan, tables, texts, workbook
from .findings import Findings, blocks
from .model import Artifact, Candidate

_TABLES = ("csv", "tsv")
_ACTIVE = ("html", "svg", "ipynb", "pdf")
_CHECKS: dict[str, Callable[[str, str, Outputs, Findings], None]] = {
    "png": images.png, "jpeg": images.jpeg, "xlsx": workbook.xlsx, "csv": tables.table, "tsv": tables.table,
    "json": texts.json, "jsonl": texts.json, "txt": texts.text, "md": texts.text, "yaml": texts.text,
}  # fmt: skip


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
    return msgspec.structs.replace(artifact, path=path)


def _verdict(candidate: Candidate, outputs: Outputs) -> Artifact:
    name = escape(candidate.name)
    if candidate.snapshot is None:
        return Artifact(path=name, verdict="reject", reasons=candidate.reasons)
    findings, kind = Findings(), "unknown"
    size, digest = candidate.size, candidate.sha256
    try:
        kind = identify.identify(candidate.snapshot, candidate.name)
        _check(candidate, candidate.snapshot, kind, outputs, findings)
        if findings.verdict == "fixed":
            size, digest = _digest(candidate.snapshot)
    except Exception as error:  # noqa: BLE001 - one file must neither pass nor take the others with it
        findings.add("unverified", "check-failed", f"the check itself failed: {type(error).__name__}",
                     "Report this with the file, or have a person look at it.")  # fmt: skip
    return Artifact(
        path=name,
        verdict=findings.verdict,
        type=kind,
        bytes=size,
        sha256=digest,
        reasons=tuple(findings.reasons),
    )


def _check(candidate: Candidate, path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    if kind not in outputs.types:
        allowed = ", ".join(outputs.types) or "none"
        findings.add(
            "reject", "type", f"the content is {kind}, which may not leave (allowed: {allowed})",
            f"Add `{kind}` to outputs.types." if kind in TYPES else "Write another format.",
        )  # fmt: skip
    if not identify.agrees(kind, candidate.name):
        findings.add("reject", "name-type", f"the name says something else than the content, which is {kind}",
                     "Give the file the ending of its content.")  # fmt: skip
    if findings.reasons:
        return
    _CHECKS.get(kind, _shallow)(path, kind, outputs, findings)
    secret_scan.scan_file(path, outputs, findings)
    expected = outputs.expect.get(candidate.name)
    if expected is None or findings.verdict == "reject":
        return
    if isinstance(expected, dict) and kind in _TABLES:
        tables.expected(path, kind, expected, findings)
    else:
        findings.add("unverified", "expectation", f"expectations for {kind} cannot be checked in this version",
                     "Expect columns and min_rows of csv or tsv files.")  # fmt: skip


def _digest(path: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for block in blocks(path):
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def _shallow(path: str, kind: str, outputs: Outputs, findings: Findings) -> None:
    """Types whose inside this version does not look into."""
    if kind in _ACTIVE:
        findings.add("review", "active-content", f"{kind} can hold scripts and remote resources, which are not checked",
                     "Have a person look at it.")  # fmt: skip
    else:
        findings.add("unverified", "not-inspected", f"this version cannot look inside {kind}",
                     "Write csv, xlsx, json, txt or png, or have a person look at it.")  # fmt: skip

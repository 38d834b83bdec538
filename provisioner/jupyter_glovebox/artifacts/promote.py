"""Moves verified snapshots outside: atomically, never over a file that is not ours and unchanged.

The destination is opened by descriptor and nothing in it is followed. A file is replaced only when the
ledger shows that we put it there and its content is still what we put; otherwise the new file gets the
next free name `name (2).ext`.

Sources: linkat(2), rename(2), open(2).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import GloveboxError
from ..ledger.events import escape
from ..ledger.store import Ledger
from .model import Artifact, Candidate, Reason

_MOST_NAMES = 1000


def promote(
    artifacts: Sequence[Artifact],
    candidates: Sequence[Candidate],
    destination: Path,
    *,
    ledger: Ledger,
    kernel_id: str,
    plan_digest: str,
    notebook: str | None,
) -> list[Artifact]:
    """Promote what is allowed or fixed.

    Args:
        artifacts, candidates: of the same files, in the same order.
        destination: host folder; made when missing.
        ledger: gets a `promotion` entry for each file: the provenance record.

    Returns:
        The artifacts, with `exported_to`, or with one more reason where it did not work.
    """
    mine = {str(r["path"]): str(r["sha256"]) for r in ledger.records("promotion", limit=1_000_000)}
    done: list[Artifact] = []
    for artifact, candidate in zip(artifacts, candidates, strict=True):
        if (
            artifact.verdict not in ("allow", "fixed")
            or candidate.snapshot is None
            or artifact.sha256 is None
        ):
            done.append(artifact)
            continue
        try:
            target = _place(candidate.snapshot, candidate.name, destination, mine, artifact.sha256)
            ledger.add(
                "promotion",
                kernel_id,
                {
                    "path": target,
                    "sha256": artifact.sha256,
                    "bytes": artifact.bytes,
                    "type": artifact.type,
                    "verdict": artifact.verdict,
                    "original_sha256": candidate.sha256,
                    "plan": plan_digest,
                    "reasons": msgspec.to_builtins(artifact.reasons),
                },
                notebook=notebook,
            )
        except (OSError, GloveboxError) as error:
            text = error.message if isinstance(error, GloveboxError) else (error.strerror or str(error))
            reason = Reason(
                code="not-written",
                message=f"it could not be written to {escape(str(destination))}: {text}",
                remedy="Free space there or choose another folder with --export.",
            )
            done.append(msgspec.structs.replace(artifact, reasons=(*artifact.reasons, reason)))
            continue
        mine[target] = artifact.sha256
        done.append(msgspec.structs.replace(artifact, exported_to=target))
    return done


def _place(snapshot: str, name: str, destination: Path, mine: dict[str, str], digest: str) -> str:
    """Write one file; its final absolute name. Raises OSError, and leaves nothing half-written."""
    parts = name.split("/")
    destination.mkdir(parents=True, exist_ok=True)
    folder = os.open(destination, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    real = os.path.realpath(destination)
    try:
        for part in parts[:-1]:
            try:
                os.mkdir(part, 0o755, dir_fd=folder)
            except FileExistsError:
                pass
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
            real = os.path.join(real, part)
        temporary = f".{parts[-1][:100]}.{os.getpid()}.part"
        try:
            _copy(snapshot, folder, temporary)
            final = _finish(folder, temporary, parts[-1], real, mine, digest)
        except BaseException:
            try:
                os.unlink(temporary, dir_fd=folder)
            except FileNotFoundError:
                pass
            raise
    finally:
        os.close(folder)
    return os.path.join(real, final)


def _copy(snapshot: str, folder: int, temporary: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(temporary, flags, 0o644, dir_fd=folder)
    with open(snapshot, "rb") as source, os.fdopen(out, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
        # The supervisor's umask is private; a result is an ordinary file.
        os.fchmod(target.fileno(), 0o644)


def _finish(folder: int, temporary: str, name: str, real: str, mine: dict[str, str], digest: str) -> str:
    """Give the file its name; the name it got."""
    stem, suffix = os.path.splitext(name)
    for number in range(1, _MOST_NAMES):
        final = name if number == 1 else f"{stem} ({number}){suffix}"
        known = mine.get(os.path.join(real, final))
        if known is not None and _digest(folder, final) in (known, digest):
            os.replace(temporary, final, src_dir_fd=folder, dst_dir_fd=folder)
            return final
        try:
            # A link never replaces anything: whoever made the name meanwhile keeps it.
            os.link(temporary, final, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            continue
        os.unlink(temporary, dir_fd=folder)
        return final
    raise OSError(errno.EEXIST, f"there are {_MOST_NAMES} files of that name")


def _digest(folder: int, name: str) -> str | None:
    """The sha256 of a regular file, None for anything else."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()

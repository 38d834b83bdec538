"""Moves verified snapshots outside: atomically, never over a file that is not ours and unchanged.

The destination is opened by descriptor, and no link is followed on the way from the notebook's folder.
A file is replaced only when the ledger shows that we put it there and its content is still what we put;
otherwise the new file gets the next free name `name (2).ext`.

Sources: renameat2(2), linkat(2), open(2).
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import secrets
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
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
_NOREPLACE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def promote(
    artifacts: Sequence[Artifact],
    candidates: Sequence[Candidate],
    destination: Path,
    *,
    ledger: Ledger,
    kernel_id: str,
    plan_digest: str,
    notebook: str | None,
    within: Path | None = None,
) -> list[Artifact]:
    """Promote what is allowed or fixed.

    Args:
        artifacts, candidates: of the same files, in the same order.
        destination: host folder; made when missing.
        ledger: gets a `promotion` entry for each file: the provenance record.
        within: the folder that `destination` must lie in; below it no part of the name may be a link. None
            when a person named the destination, links and all.

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
            with _Folder(destination, within) as folder:
                target = _place(candidate.snapshot, candidate.name, folder, mine, artifact.sha256)
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
                remedy="Free space there, remove the link, or choose another folder with --export.",
            )
            done.append(msgspec.structs.replace(artifact, reasons=(*artifact.reasons, reason)))
            continue
        mine[target] = artifact.sha256
        done.append(msgspec.structs.replace(artifact, exported_to=target))
    return done


class _Folder:
    """The destination, made when missing and opened. `real` is its name without links.

    Raises:
        OSError: it cannot be made or opened.
        GloveboxError: a part of its name below `within` is a link: who may write in the notebook's folder
            does not choose where on the host files appear.
    """

    def __init__(self, destination: Path, within: Path | None) -> None:
        if within is None:
            destination.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(destination, _DIRECTORY)
            self.real = os.path.realpath(destination)
            return
        self.fd = os.open(within, _DIRECTORY)
        self.real = os.path.realpath(within)
        try:
            for part in destination.relative_to(within).parts:
                self.enter(part)
        except BaseException:
            os.close(self.fd)
            raise

    def enter(self, part: str) -> None:
        """Go into a folder in it, made when missing. Raises OSError, GloveboxError for a link."""
        try:
            os.mkdir(part, 0o755, dir_fd=self.fd)
        except FileExistsError:
            pass
        try:
            inner = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd)
        except NotADirectoryError as error:
            if not stat.S_ISLNK(os.stat(part, dir_fd=self.fd, follow_symlinks=False).st_mode):
                raise
            raise GloveboxError(f"{escape(os.path.join(self.real, part))} is a link") from error
        os.close(self.fd)
        self.fd = inner
        self.real = os.path.join(self.real, part)

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _place(snapshot: str, name: str, folder: _Folder, mine: dict[str, str], digest: str) -> str:
    """Write one file; its final absolute name. Raises OSError, and leaves nothing half-written."""
    parts = name.split("/")
    for part in parts[:-1]:
        folder.enter(part)
    temporary = f".{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(temporary, flags, 0o644, dir_fd=folder.fd)
    # From here on the temporary name is ours, and goes whatever happens.
    try:
        _copy(snapshot, out)
        final = _finish(folder.fd, temporary, parts[-1], folder.real, mine, digest)
    except BaseException:
        try:
            os.unlink(temporary, dir_fd=folder.fd)
        except FileNotFoundError:
            pass
        raise
    return os.path.join(folder.real, final)


def _copy(snapshot: str, out: int) -> None:
    with os.fdopen(out, "wb") as target, open(snapshot, "rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        # The supervisor's umask is private; a result is an ordinary file.
        os.fchmod(target.fileno(), 0o644)
        os.fsync(target.fileno())


def _finish(folder: int, temporary: str, name: str, real: str, mine: dict[str, str], digest: str) -> str:
    """Give the file its name; the name it got."""
    stem, suffix = os.path.splitext(name)
    for number in range(1, _MOST_NAMES):
        final = name if number == 1 else f"{stem} ({number}){suffix}"
        known = mine.get(os.path.join(real, final))
        if known is not None and _digest(folder, final) in (known, digest):
            os.replace(temporary, final, src_dir_fd=folder, dst_dir_fd=folder)
            return final
        if _rename(folder, temporary, final):
            return final
    raise OSError(errno.EEXIST, f"there are {_MOST_NAMES} files of that name")


def _rename(folder: int, temporary: str, final: str) -> bool:
    """Rename without ever replacing anything; False when the name is taken. Raises OSError."""
    number = _RENAMEAT2.get(platform.machine())
    if number is not None:
        one, two = os.fsencode(temporary), os.fsencode(final)
        fd = ctypes.c_int(folder)
        if _libc.syscall(ctypes.c_long(number), fd, one, fd, two, ctypes.c_uint(_NOREPLACE)) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.EEXIST:
            return False
        if code not in (errno.EINVAL, errno.ENOSYS):  # this file system has no such rename
            raise OSError(code, os.strerror(code))
    try:
        os.link(temporary, final, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    os.unlink(temporary, dir_fd=folder)
    return True


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

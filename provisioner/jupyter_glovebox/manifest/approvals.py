"""A person's yes to one manifest of one notebook, kept outside every sandbox.

An approval is bound to the notebook's real path and the manifest's digest; it also keeps where each
input led at that time, so that a link that is pointed elsewhere afterwards does not go unnoticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import GloveboxError, RefusedError
from ..ledger.events import escape
from ..locations import state_dir
from .loading import load_manifest
from .policy import user_name

Method = Literal["click", "code"]


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """One approval. `sources` maps each input's name inside to its real path. `time` is Unix time."""

    notebook: str
    manifest: str
    method: Method
    time: float
    user: str
    sources: dict[str, str] = {}


def _file() -> Path:
    return state_dir() / "approvals.json"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    path = state_dir() / "approvals.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _not_stored(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def stored() -> list[Approval]:
    """Every approval, oldest first.

    Raises:
        GloveboxError: the store is damaged; it never counts as empty.
    """
    path = _file()
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Approval])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise GloveboxError(
            f"The approvals in {path} cannot be read: {error}.",
            "Move the file away and approve your notebooks again.",
        ) from error


def _not_stored(path: Path, error: OSError) -> GloveboxError:
    return GloveboxError(
        f"The approvals in {path} cannot be changed: {error.strerror}.",
        "Free space or the name, and try again.",
    )


def _write(approvals: list[Approval]) -> None:
    path = _file()
    temporary = path.with_name(f"approvals.{os.getpid()}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(approvals)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _not_stored(path, error) from error


def approve(
    notebook: Path,
    manifest_file: Path,
    *,
    method: Method = "code",
    sources: dict[str, str] | None = None,
    digest: str | None = None,
) -> Approval:
    """Store an approval; it replaces the notebook's former one.

    Args:
        notebook: the notebook.
        manifest_file: the manifest that was shown.
        method: `code` for the command line and one-time codes, `click` for a click in the browser.
        sources: where each input leads now.
        digest: the digest of the manifest that was shown; with it, a file that changed meanwhile is refused.

    Raises:
        ManifestError: the manifest is not valid.
        RefusedError: the manifest is not the one that was shown.
        GloveboxError: the store cannot be read or written.
    """
    manifest = load_manifest(manifest_file).digest
    if digest is not None and digest != manifest:
        raise RefusedError(
            f"The manifest {escape(str(manifest_file))} changed while it was being approved.",
            "Look at it again, then approve it.",
        )
    approval = Approval(
        notebook=os.path.realpath(notebook),
        manifest=manifest,
        method=method,
        time=time.time(),
        user=user_name(),
        sources=sources or {},
    )
    with _locked():
        _write([a for a in stored() if a.notebook != approval.notebook] + [approval])
    return approval


def revoke(notebook: Path) -> bool:
    """Remove a notebook's approval; whether there was one. Raises GloveboxError."""
    real = os.path.realpath(notebook)
    with _locked():
        before = stored()
        after = [a for a in before if a.notebook != real]
        if len(after) == len(before):
            return False
        _write(after)
    return True


def find(notebook: Path | str) -> Approval | None:
    """The notebook's approval, whatever manifest it is for. Raises GloveboxError."""
    real = os.path.realpath(notebook)
    return next((a for a in stored() if a.notebook == real), None)

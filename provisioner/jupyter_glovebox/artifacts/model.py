"""Shapes of the export boundary. Fields are a contract."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["allow", "fixed", "review", "reject", "unverified"]


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a verdict is what it is. `where` is a place in the file (`line 3`, `entry x`), or empty."""

    code: str
    where: str = ""
    message: str
    remedy: str = ""


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One file that somebody wants outside.

    Attributes:
        path: relative to the outputs folder, escaped.
        type: by content; None for what could not be looked at.
        bytes, sha256: of the snapshot (of the fixed copy for `fixed`).
        exported_to: where it was promoted to, None while it was not.
    """

    path: str
    verdict: Verdict
    type: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    reasons: tuple[Reason, ...] = ()
    exported_to: str | None = None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A file taken in, or refused at the door.

    Attributes:
        name: relative name as bytes decoded with surrogateescape.
        snapshot: path of the private copy, None when refused.
        size, sha256: of the copy.
        reasons: why it was refused; empty when it was taken in.
    """

    name: str
    snapshot: str | None = None
    size: int | None = None
    sha256: str | None = None
    reasons: tuple[Reason, ...] = ()

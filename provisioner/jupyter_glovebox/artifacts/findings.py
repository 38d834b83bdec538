"""What the checks of one file found, and the verdict it adds up to."""

from __future__ import annotations

from collections.abc import Iterator

from .model import Reason, Verdict

_ORDER: tuple[Verdict, ...] = ("allow", "fixed", "review", "unverified", "reject")
_MOST_REASONS = 50
CHUNK = 1 << 20


class Findings:
    """Reasons so far and the verdict they add up to.

    Attributes:
        reasons: at most 50.
        verdict: the strictest of all findings.
    """

    def __init__(self) -> None:
        self.reasons: list[Reason] = []
        self.verdict: Verdict = "allow"

    def add(self, verdict: Verdict, code: str, message: str, remedy: str = "", where: str = "") -> None:
        """Take a finding in. The same message is kept once, with its first place."""
        if len(self.reasons) < _MOST_REASONS and all(r.message != message for r in self.reasons):
            self.reasons.append(Reason(code=code, where=where, message=message, remedy=remedy))
        if _ORDER.index(verdict) > _ORDER.index(self.verdict):
            self.verdict = verdict


def blocks(path: str) -> Iterator[bytes]:
    """A file in pieces of 1 MiB. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        while block := file.read(CHUNK):
            yield block

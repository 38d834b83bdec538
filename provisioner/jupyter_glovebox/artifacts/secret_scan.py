"""Looks for credentials in bytes, by their published forms.

A block is searched with an expression only where it holds the expression's fixed word; most data holds
none, so a scan costs little more than reading.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..manifest.plan import Outputs
from .findings import Findings, blocks

_OVERLAP = 4096


class _Secret(NamedTuple):
    """`words`: one of them stands in every secret of that kind. `sign`: a byte of all of them, or nothing.

    A single byte is found much faster than a word.
    """

    name: str
    sign: bytes
    words: tuple[bytes, ...]
    pattern: re.Pattern[bytes]


_SECRETS = (
    _Secret("private key", b"Y", (b"PRIVATE KEY",), re.compile(rb"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----")),
    _Secret("AWS access key", b"A", (b"AKIA", b"ASIA"),
            re.compile(rb"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])")),
    _Secret("AWS secret key", b"", (b"ecret_access_key", b"SECRET_ACCESS_KEY", b"ecretAccessKey"),
            re.compile(rb"(?i)secret_?access_?key[\"']?\s*[=:,;]\s*[\"']?[A-Za-z0-9/+]{20}")),
    _Secret("GitHub token", b"_", (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
            re.compile(rb"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50})")),
    _Secret("GitLab token", b"-", (b"glpat-",), re.compile(rb"glpat-[A-Za-z0-9_-]{20}")),
    _Secret("Slack token", b"x", (b"xox",), re.compile(rb"xox[abprs]-[A-Za-z0-9-]{10}")),
    _Secret("Google API key", b"z", (b"AIza",), re.compile(rb"AIza[0-9A-Za-z_-]{35}")),
    _Secret("Stripe key", b"_", (b"k_live_",), re.compile(rb"(?:sk|rk)_live_[0-9A-Za-z]{20}")),
    _Secret("API key of a model provider", b"-", (b"sk-",),
            re.compile(rb"(?<![A-Za-z0-9])sk-(?:(?:ant-|proj-)[A-Za-z0-9_-]{32}|[A-Za-z0-9]{32})")),
    _Secret("JSON Web Token", b"J", (b"eyJ",),
            re.compile(rb"eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{10}")),
    _Secret("password in a URL", b":", (b"://",),
            re.compile(rb"://[^/\s:@\"',;]{1,64}:[^/\s:@\"',;]{3,64}@[A-Za-z0-9.-]{3}")),
)  # fmt: skip


def scan_file(path: str, outputs: Outputs, findings: Findings) -> None:
    """Look through a whole file. A secret across the border of two blocks is found as well."""
    if outputs.secrets == "allow":
        return
    tail, line = b"", 1
    for block in blocks(path):
        text = tail + block
        scan(text, outputs, findings, "", first_line=line - tail.count(b"\n"))
        line += block.count(b"\n")
        tail = text[-_OVERLAP:]


def scan(text: bytes, outputs: Outputs, findings: Findings, where: str, *, first_line: int = 0) -> None:
    """Look through some bytes.

    Args:
        where: the place to report; where it is empty, the line, counted from `first_line`.
    """
    if outputs.secrets == "allow":
        return
    for secret in _SECRETS:
        if secret.sign not in text or not any(word in text for word in secret.words):
            continue
        if found := secret.pattern.search(text):
            line = first_line + text.count(b"\n", 0, found.start())
            findings.add(
                "reject" if outputs.secrets == "reject" else "review",
                "secret",
                f"the file holds what looks like a secret: {secret.name}",
                "Remove it from the data.",
                where or f"line {line}",
            )

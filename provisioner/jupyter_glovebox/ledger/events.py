"""Shapes of what the ledger keeps. Fields may be added, never renamed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

EventClass = Literal[
    "not-granted", "read-only", "network", "syscall", "limit", "export", "message", "input-stale",
    "left-behind", "cleanup", "observation",
]  # fmt: skip
Severity = Literal["info", "warning", "high"]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The cell that was running. `index` counts the notebook's cells from 0, None when unknown."""

    execution_count: int | None
    msg_id: str
    index: int | None = None
    cell_id: str | None = None


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """The process that tried; `pid` as the host sees it. Text is hostile and comes escaped."""

    pid: int
    comm: str
    cmdline: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A blocked access, or another fact a person must see. `time` is Unix time in seconds.

    Attributes:
        seq: the ledger's sequence number; 0 before the event is stored.
        event_class: `class` in JSON.
        operation: `open`, `create`, `exec`, `connect`, `memory`, …
        target: path, address or budget; control characters are escaped.
        sensitive: the target is a credential store or a metadata address.
        count: how many identical attempts this event stands for.
        errno: the name of the errno the program got (`EACCES`), None when the call was not answered so.
        rule: the plan's rule that decided, or that is missing.
        suggestion: the exact manifest line, or why no manifest can allow it.
    """

    seq: int = 0
    time: float
    event_class: EventClass = msgspec.field(name="class")
    operation: str
    target: str
    sensitive: bool = False
    severity: Severity = "warning"
    count: int = 1
    errno: str | None = None
    rule: str = ""
    suggestion: str = ""
    kernel_id: str
    notebook: str | None
    plan: str
    cell: Cell | None = None
    process: Process | None = None


class CleanupStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of destruction: whether it was seen to have worked, and how."""

    verified: bool
    detail: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel used. Seconds, bytes, counts; None where this machine cannot measure it."""

    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    wall_seconds: float = 0.0
    startup_seconds: float | None = None
    processes_peak: int | None = None
    scratch_bytes: int | None = None
    display_bytes: int | None = None
    network: dict[str, Any] = {}


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One per kernel life, written when its sandbox has gone.

    Attributes:
        closed_by: `shutdown`, `restart`, `kill` (ended at once, also to restart), `exit` (by itself),
            `budget:<name>`, `manager-gone`, `failed-launch`, `sweep`.
        cleanup: steps `processes`, `cgroup`, `credentials`, `storage`, `sockets`.
    """

    kernel_id: str
    notebook: str | None
    plan: str
    started: float
    ended: float
    closed_by: str
    usage: Usage
    cleanup: dict[str, CleanupStep]
    isolation: str = "bubblewrap"
    exit_status: int | None = None


def escape(text: str | bytes) -> str:
    """Make hostile text safe to print: control, format and undecodable characters become escapes.

    Covers C0/C1, DEL, bidirectional and zero-width controls (Unicode categories Cc, Cf, Cs, Zl, Zp).
    """
    import unicodedata

    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if text.isascii() and text.isprintable():
        return text
    out: list[str] = []
    for char in text:
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:
            out.append(f"\\x{code - 0xDC00:02x}")
        elif unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            out.append(
                f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
            )
        else:
            out.append(char)
    return "".join(out)

"""How results look on a terminal. Hostile text comes escaped from the ledger; names from elsewhere are escaped here."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..ledger.events import Event, Usage
from ..limits.base import ControlState

# What JSON leaves as it is, and a terminal or an editor obeys: DEL, C1 controls, marks of direction,
# separators of lines; and surrogates, which cannot be printed at all.
_OBEYED = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def json_text(value: object) -> str:
    """A value as indented JSON that is safe to print, with every control character escaped."""
    text = json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False)
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def as_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    print(json_text(value))


def note(text: str) -> None:
    """A remark for the person, on standard error, so that output can be piped."""
    print(text, file=sys.stderr)


def positive(text: str) -> int:
    """An argument that is a whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def size(count: float | None) -> str:
    """Bytes in units of 1024: `1.5 MiB`."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def table(rows: Iterable[Sequence[str]], *, head: Sequence[str]) -> str:
    """Columns padded to their widest cell, two spaces between them."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    )


def wrapped(text: str, indent: int) -> str:
    """One paragraph; on a terminal broken at its width, later lines indented by `indent` columns."""
    if not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns, indent + 30)
    return textwrap.fill(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def where(event: Event) -> str:
    """Which cell: `in cell [3]`, `outside a cell`."""
    if event.cell is None:
        return "outside a cell"
    if event.cell.execution_count is not None:
        return f"in cell [{event.cell.execution_count}]"
    return "in a cell"


def events(found: Sequence[Event]) -> str:
    """One block per event: what was blocked, where, and what to do."""
    lines = []
    for event in found:
        times = f" ({event.count} times)" if event.count > 1 else ""
        mark = " !! sensitive" if event.sensitive else ""
        # The target of a limit is a whole sentence that names the budget.
        what = event.target if event.event_class == "limit" else f"{event.operation} {event.target}"
        lines.append(f"{event.seq:>5}  {event.event_class}: {what}{times}{mark}")
        who = f", by {event.process.comm} ({event.process.pid})" if event.process else ""
        lines.append(f"       {where(event)}{who}" + (f"; {event.errno}" if event.errno else ""))
        if event.suggestion:
            lines.append(f"       → {event.suggestion}")
    return "\n".join(lines)


def usage(used: Usage) -> str:
    """One line: CPU, memory, time, processes."""
    cpu = "unknown" if used.cpu_seconds is None else f"{used.cpu_seconds:.2f} s"
    start = "" if used.startup_seconds is None else f" (start {used.startup_seconds:.2f} s)"
    return (
        f"CPU {cpu}, peak memory {size(used.peak_memory_bytes)}, "
        f"wall {used.wall_seconds:.1f} s{start}, at most {used.processes_peak or 'unknown'} tasks"
    )


def posture(controls: dict[str, ControlState]) -> str:
    """A table of controls; below it each fix, once, with the controls that it improves."""
    rows = [(name, control.state, control.reason) for name, control in controls.items()]
    lines = table(rows, head=("CONTROL", "STATE", "WHY")).splitlines()
    column = lines[0].index("WHY")
    text = "\n".join(wrapped(line, column) for line in lines)
    fixes: dict[str, list[str]] = {}
    for name, control in controls.items():
        if control.state != "enforced" and control.fix:
            fixes.setdefault(control.fix, []).append(name)
    # Not wrapped: a command has to survive copying.
    steps = [f"  {', '.join(names)}:\n    {fix}" for fix, names in fixes.items()]
    return text + ("\n\nTo improve:\n" + "\n".join(steps) if steps else "")


def weaker(controls: dict[str, ControlState]) -> str:
    """The controls that are not enforced, those with one reason together; empty when all are."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, control in controls.items():
        if control.state != "enforced":
            reasons.setdefault((control.state, control.reason), []).append(name)
    return "\n".join(
        wrapped(f"  {state}: {', '.join(names)} ({reason})", 4) for (state, reason), names in reasons.items()
    )


def artifacts(found: Sequence[dict[str, Any]]) -> str:
    """One line per file, with the reasons below it."""
    lines = []
    for artifact in found:
        target = f" → {artifact['exported_to']}" if artifact.get("exported_to") else ""
        kind = f"{artifact.get('type') or 'unknown'}, {size(artifact.get('bytes'))}"
        lines.append(f"  {artifact['verdict']:<10} {artifact['path']} ({kind}){target}")
        for reason in artifact.get("reasons", ()):
            remedy = f". {reason['remedy']}" if reason.get("remedy") else ""
            lines.append(wrapped(f"             {reason['code']}: {reason['message']}{remedy}", 13))
    return "\n".join(lines)

"""How results look on a terminal. Hostile text comes escaped from the ledger; names from elsewhere are escaped here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..ledger.events import Event, Usage
from ..limits.base import ControlState


def as_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    print(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """A remark for the person, on standard error, so that output can be piped."""
    print(text, file=sys.stderr)


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


def where(event: Event) -> str:
    """Which cell: `cell [3]`, `before the first cell`."""
    if event.cell is None:
        return "outside a cell"
    if event.cell.execution_count is not None:
        return f"cell [{event.cell.execution_count}]"
    return "a cell"


def events(found: Sequence[Event]) -> str:
    """One block per event: what was blocked, where, and what to do."""
    lines = []
    for event in found:
        times = f" ({event.count} times)" if event.count > 1 else ""
        mark = " !! sensitive" if event.sensitive else ""
        lines.append(f"{event.seq:>5}  {event.event_class}: {event.operation} {event.target}{times}{mark}")
        who = f", by {event.process.comm} ({event.process.pid})" if event.process else ""
        lines.append(f"       in {where(event)}{who}" + (f"; {event.errno}" if event.errno else ""))
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


def posture(controls: dict[str, ControlState], *, all_of_them: bool = True) -> str:
    """A table of controls; the fix below each that is not enforced."""
    shown = {n: c for n, c in controls.items() if all_of_them or c.state != "enforced"}
    rows = [(name, control.state, control.reason) for name, control in shown.items()]
    text = table(rows, head=("CONTROL", "STATE", "WHY"))
    fixes = [f"  {name}: {c.fix}" for name, c in shown.items() if c.state != "enforced" and c.fix]
    return text + ("\n\nTo improve:\n" + "\n".join(fixes) if fixes else "")


def artifacts(found: Sequence[dict[str, Any]]) -> str:
    """One line per file, with the reasons below it."""
    lines = []
    for artifact in found:
        target = f" → {artifact['exported_to']}" if artifact.get("exported_to") else ""
        kind = f"{artifact.get('type') or 'unknown'}, {size(artifact.get('bytes'))}"
        lines.append(f"  {artifact['verdict']:<10} {artifact['path']} ({kind}){target}")
        for reason in artifact.get("reasons", ()):
            remedy = f" {reason['remedy']}" if reason.get("remedy") else ""
            lines.append(f"             {reason['code']}: {reason['message']}{remedy}")
    return "\n".join(lines)

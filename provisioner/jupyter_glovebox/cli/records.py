"""`ps`, `events`, `usage`: running kernels and the ledger."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Exit
from ..ledger.events import escape
from ..ledger.store import Ledger
from ..locations import runtime_dir, state_dir
from ..supervisor.state import alive, read_states
from ..supervisor.sweep import sweep_dead
from . import show


def register(subparsers: Any) -> None:
    """Add the commands of this module."""
    parser = subparsers.add_parser("ps", help="running kernels", description="List running sandboxes.")
    parser.add_argument("--sweep", action="store_true", help="clean up after supervisors that were killed")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_ps)
    parser = subparsers.add_parser("events", help="blocked accesses and other events in the ledger")
    parser.add_argument("--since", type=int, default=0, metavar="SEQ", help="only events after this number")
    parser.add_argument(
        "--limit", type=show.positive, default=1000, metavar="N", help="at most N (default 1000)"
    )
    parser.add_argument("--kernel", metavar="ID", help="only this kernel's")
    parser.add_argument("--notebook", type=Path, metavar="NB", help="only this notebook's")
    parser.add_argument("--verify", action="store_true", help="check the ledger's hash chain as well")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_events)
    parser = subparsers.add_parser(
        "usage", help="what each kernel used, and whether its clean-up was verified"
    )
    parser.add_argument("--kernel", metavar="ID", help="only this kernel's")
    parser.add_argument("--notebook", type=Path, metavar="NB", help="only this notebook's")
    parser.add_argument(
        "--limit", type=show.positive, default=1000, metavar="N", help="at most N (default 1000)"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_usage)


def _ledger() -> Ledger:
    return Ledger(str(state_dir() / "ledger.sqlite3"))


def _real(notebook: Path | None) -> str | None:
    return None if notebook is None else str(notebook.resolve())


def _ps(args: argparse.Namespace) -> int:
    swept = sweep_dead() if args.sweep else []
    states = read_states(runtime_dir())
    kernels = [msgspec.to_builtins(state) | {"alive": alive(state)} for state in states]
    for kernel in kernels:
        for hidden in ("supervisor_start", "limiter", "ledger"):
            kernel.pop(hidden)
    if args.json:
        show.as_json({"kernels": kernels, "swept": swept})
        return int(Exit.DONE)
    if swept:
        print(f"Cleaned up after {len(swept)} killed supervisor(s).")
    if not kernels:
        print("No kernel is running.")
        return int(Exit.DONE)
    rows = [
        (
            k["kernel_id"][:12],
            escape(k["notebook"] or "-"),
            k["isolation"] if k["alive"] else "dead: run ps --sweep",
            _age(k["started"]),
            show.size(k["usage"]["peak_memory_bytes"]),
            str(k["blocked"]),
        )
        for k in kernels
    ]
    print(show.table(rows, head=("KERNEL", "NOTEBOOK", "ISOLATION", "AGE", "PEAK", "BLOCKED")))
    return int(Exit.DONE)


def _age(started: float) -> str:
    seconds = int(time.time() - started)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"


def _events(args: argparse.Namespace) -> int:
    ledger = _ledger()
    try:
        found, following = ledger.events(
            since=args.since, kernel_id=args.kernel, notebook=_real(args.notebook), limit=args.limit
        )
        broken = ledger.verify_chain() if args.verify else None
    finally:
        ledger.close()
    if args.json:
        body: dict[str, Any] = {"events": found, "next": following}
        show.as_json(body | ({"chain_broken_at": broken} if args.verify else {}))
    else:
        print(show.events(found) if found else "No events.")
        if args.verify:
            print(
                "The ledger's chain is intact."
                if broken is None
                else f"The ledger was changed at entry {broken}."
            )
    return int(Exit.ERROR if broken is not None else Exit.DONE)


def _usage(args: argparse.Namespace) -> int:
    ledger = _ledger()
    try:
        records = ledger.usage(kernel_id=args.kernel, notebook=_real(args.notebook), limit=args.limit)
    finally:
        ledger.close()
    if args.json:
        show.as_json({"records": [_flat(record) for record in records]})
    elif not records:
        print("No kernel has ended yet.")
    else:
        for record in records:
            clean = all(step.verified for step in record.cleanup.values())
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
            print(f"{when}  {record.kernel_id[:12]}  {escape(record.notebook or '-')}")
            print(f"    {show.usage(record.usage)}")
            print(f"    closed by {record.closed_by}; clean-up {'verified' if clean else 'NOT verified'}")
    return int(Exit.DONE)


def _flat(record: Any) -> dict[str, Any]:
    """The contract's shape: usage's fields beside the record's."""
    body: dict[str, Any] = msgspec.to_builtins(record)
    usage: dict[str, Any] = body.pop("usage")
    return usage | body

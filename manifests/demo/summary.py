"""Shows the result of the demo's run, and holds it against what the workbook's maker knows.

    python manifests/demo/summary.py RESULT.json

RESULT.json is what `jupyter glovebox run --json` printed. The status is 1 when the notebook did not get
to its end, a file is missing or wrong, an attempt was not reported, or something was left behind.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import make_workbook
from jupyter_glovebox.ledger.events import escape

FILES = ("clean.csv", "clients_clean.xlsx", "revenue.png")


def _size(count: float | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1024:.0f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.0f} MiB"


def _blocked(events: list[dict[str, Any]]) -> list[str]:
    lines = []
    for event in events:
        mark = "  (sensitive)" if event.get("sensitive") else ""
        lines.append(f"  {event['class']}: {event['operation']} {escape(event['target'])}{mark}")
        cell = event.get("cell")
        where = f"cell [{cell['execution_count']}]; " if cell and cell.get("execution_count") else ""
        lines.append(f"    {where}{escape(event.get('suggestion') or '')}".rstrip("; "))
    return lines


def check_figures(clean: Path) -> list[str]:
    """Differences between `clean.csv` and the truth; empty when there are none."""
    truth = make_workbook.truth()
    cents: dict[str, int] = defaultdict(int)
    chf: dict[int, float] = defaultdict(float)
    invoices: dict[int, int] = defaultdict(int)
    with clean.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            year = int(row["date"][:4])
            invoices[year] += 1
            if row["status"] != "cancelled":
                cents[row["currency"]] += round(float(row["amount"]) * 100)
                chf[year] += float(row["total"])
    wrong = []
    if dict(invoices) != truth.invoices:
        wrong.append(f"invoices: {dict(invoices)}, should be {truth.invoices}")
    if dict(cents) != truth.revenue_cents:
        wrong.append(f"revenue in cents: {dict(cents)}, should be {truth.revenue_cents}")
    # One half cent may round either way in each conversion; the sums stay within one franc.
    wrong += [
        f"revenue {year}: CHF {chf[year]:.2f}, should be {total:.2f}"
        for year, total in truth.revenue_chf.items()
        if abs(chf[year] - total) >= 1
    ]
    return wrong


def _problems(result: dict[str, Any], exported: dict[str, str]) -> list[str]:
    problems = []
    if result["status"] != "completed":
        problems.append(
            f"the notebook: {result['status']} ({escape(str(result.get('reason') or 'no reason'))})"
        )
    problems += [f"{name} did not come out" for name in FILES if name not in exported]
    if clean := exported.get("clean.csv"):
        problems += check_figures(Path(clean))
    kinds = {"sensitive" for e in result["blocked"] if e.get("sensitive")} | {
        e["class"] for e in result["blocked"]
    }
    problems += [f"no {kind} attempt was reported" for kind in ("sensitive", "network") if kind not in kinds]
    steps = result["cleanup"]
    problems += [
        f"clean-up of {name}: {step['detail']}" for name, step in steps.items() if not step["verified"]
    ]
    if not steps:
        problems.append("the clean-up was not verified")
    return problems


def show(result: dict[str, Any]) -> list[str]:
    """Print the result; gives what is wrong with it."""
    artifacts = result["artifacts"]
    exported = {a["path"].rsplit("/", 1)[-1]: a["exported_to"] for a in artifacts if a.get("exported_to")}
    print(f"\nThe notebook: {result['status']}")
    print("\nBlocked:")
    print("\n".join(_blocked(result["blocked"])) or "  nothing")
    print("\nFiles, looked at before they left the sandbox:")
    for artifact in artifacts:
        target = escape(artifact.get("exported_to") or "stays inside")
        print(
            f"  {artifact['verdict']:<8} {escape(artifact['path'])} ({_size(artifact['bytes'])}) -> {target}"
        )
        for reason in artifact["reasons"]:
            print(f"           {reason['code']}: {escape(reason['message'])}")
    if usage := result.get("usage"):
        cpu = "unknown" if usage["cpu_seconds"] is None else f"{usage['cpu_seconds']:.1f} s"
        peak, seconds = _size(usage["peak_memory_bytes"]), usage["wall_seconds"]
        print(f"\nUsed: CPU {cpu}, at most {peak}, {seconds:.1f} s")
    if gone := [name for name, step in result["cleanup"].items() if step["verified"]]:
        print(f"Gone and seen to be gone: {', '.join(gone)}")
    soft = {name: c for name, c in result["posture"].items() if c["state"] != "enforced"}
    if soft:
        print("\nNot fully enforced on this machine (jupyter glovebox doctor says how to improve it):")
        for name, control in soft.items():
            print(f"  {name}: {control['state']} - {escape(control['reason'])}")
    problems = _problems(result, exported)
    if not problems:
        print("\nThe amounts in clean.csv are right to the cent (the workbook's maker knows them).")
    return problems


def main(arguments: list[str]) -> int:
    """Read the result, show it, check it."""
    text = Path(arguments[0]).read_text(encoding="utf-8")
    try:
        result = json.loads(text)
    except ValueError:
        print(f"The run gave no result: {escape(text[:500]) or 'it printed nothing'}", file=sys.stderr)
        return 1
    if "error" in result and not result.get("artifacts"):
        error = result["error"]
        print(f"{escape(error['message'])}\n  {escape(error['remedy'])}".rstrip(), file=sys.stderr)
        return 1
    problems = show(result)
    sys.stdout.flush()
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

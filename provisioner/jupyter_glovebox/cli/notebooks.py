"""`run`: a notebook, headless, in its sandbox."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import Exit, GloveboxError, RefusedError
from ..limits.base import ControlState
from ..manifest.compile import resolve
from . import show


def register(subparsers: Any) -> None:
    """Add the commands of this module."""
    parser = subparsers.add_parser(
        "run",
        help="run a notebook headless in its sandbox",
        description="Run every cell in a sandbox, verify and export what it wrote, and report what was blocked. "
        "With --manifest you approve that manifest for this run; otherwise the approved manifest beside the "
        "notebook counts, and without one the baseline (no inputs, no network).",
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="what the notebook may touch")
    parser.add_argument("--output", type=Path, metavar="NB", help="write the executed notebook here")
    parser.add_argument("--export", type=Path, metavar="DIR", help="where verified outputs go")
    parser.add_argument("--kernel", metavar="NAME", help="kernelspec to use instead of the notebook's")
    parser.add_argument("--timeout", type=show.positive, metavar="SECONDS", help="longest time for one cell")
    parser.add_argument("--allow-errors", action="store_true", help="go on after a cell that raised")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when anything was blocked")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_run, error_body=_refusal)


def _refusal(error: GloveboxError) -> dict[str, Any]:
    """The `run` result of a start that was refused."""
    return {
        "status": "refused" if isinstance(error, RefusedError) else "error",
        "reason": error.message,
        "posture": {},
        "blocked": [],
        "artifacts": [],
        "usage": None,
        "cleanup": {},
    }


def _run(args: argparse.Namespace) -> int:
    from .runner import read_notebook, run_notebook, to_json

    read_notebook(args.notebook)
    resolution = resolve(
        args.notebook, manifest_file=args.manifest, caller_approves=args.manifest is not None
    )
    if resolution.notice:
        show.note(resolution.notice)
    try:
        result = run_notebook(
            args.notebook,
            resolution,
            kernel=args.kernel,
            output=args.output,
            export_dir=args.export,
            timeout=args.timeout,
            allow_errors=args.allow_errors,
        )
    except FileNotFoundError as error:
        raise GloveboxError(
            f"The kernel's program does not exist: {error.filename}.",
            "See: jupyter kernelspec list; reinstall the kernel, or name another one with --kernel.",
        ) from error
    print(to_json(result) if args.json else _summary(result))
    bad = [a for a in result.artifacts if a["verdict"] not in ("allow", "fixed") or not a.get("exported_to")]
    if result.status != "completed" or bad or (args.strict and result.blocked):
        return int(Exit.ERROR)
    return int(Exit.DONE)


def _summary(result: Any) -> str:
    lines = [f"{result.notebook}: {result.status}" + (f" ({result.reason})" if result.reason else "")]
    if result.status == "budget":
        lines.append("  Use less, or raise that budget in the manifest and approve it again.")
    # Files that stayed behind are among the files below, with every reason.
    blocked = [e for e in result.blocked if not (e.event_class == "left-behind" and result.artifacts)]
    if blocked:
        lines += ["", "Blocked accesses and other events:", show.events(blocked)]
    else:
        lines += ["", "Nothing was blocked."]
    if result.artifacts:
        lines += ["", "Files:", show.artifacts(result.artifacts)]
    if result.usage is not None:
        lines += ["", "Used: " + show.usage(result.usage)]
    failed = [f"{name}: {step['detail']}" for name, step in result.cleanup.items() if not step["verified"]]
    lines.append(
        "Clean-up: " + ("verified" if result.cleanup and not failed else "NOT verified. " + "; ".join(failed))
    )
    soft = {
        name: ControlState(c["state"], c["reason"], c.get("fix", ""))
        for name, c in result.posture.items()
        if c["state"] != "enforced"
    }
    if soft:
        lines += ["", "Not fully enforced (`jupyter glovebox doctor` has the fixes):", show.weaker(soft)]
    return "\n".join(lines)

"""`check`, `init`, `explain`, `approve`, `revoke`: manifests and what a person says to them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import Exit, GloveboxError, UsageError
from ..ledger.events import Event, escape
from ..ledger.store import Ledger
from ..locations import state_dir
from ..manifest import approvals
from ..manifest.compile import find_manifest, resolve
from ..manifest.draft import draft_manifest
from ..manifest.explain import explain
from ..manifest.loading import ManifestError, load_manifest, load_policy
from . import show


def register(subparsers: Any) -> None:
    """Add the commands of this module."""
    parser = subparsers.add_parser(
        "check",
        help="validate manifests and policies",
        description="Validate files; a file named policy*.yaml is read as a policy, every other as a manifest.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_check)

    parser = subparsers.add_parser(
        "init",
        help="draft a manifest for a notebook",
        description="Write NAME.glovebox.yaml beside NAME.ipynb, from the paths in the notebook's code. "
        "It grants nothing until you approve it.",
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "--from-run", action="store_true", help="run it on the baseline first, and learn from it"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing manifest")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_init)

    parser = subparsers.add_parser("explain", help="what a notebook may do, in plain words")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="explain this manifest instead")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_explain)

    parser = subparsers.add_parser(
        "approve",
        help="approve a notebook's manifest",
        description="Show what the manifest asks for, and approve it. A changed manifest needs a new approval.",
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_approve)

    parser = subparsers.add_parser("revoke", help="take an approval back")
    parser.add_argument("notebook", type=Path, nargs="?")
    parser.add_argument("--credential", metavar="NAME", help="revoke a credential instead")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_revoke)


def _check(args: argparse.Namespace) -> int:
    results = []
    for file in args.files:
        errors = []
        try:
            (load_policy if file.name.startswith("policy") else load_manifest)(file)
        except ManifestError as error:
            errors = [
                {"line": p.line, "column": p.column, "message": p.message, "remedy": p.remedy}
                for p in error.problems
            ]
        results.append({"path": str(file), "valid": not errors, "errors": errors})
    if args.json:
        show.as_json({"files": results})
    else:
        for result in results:
            name = escape(str(result["path"]))
            if result["valid"]:
                print(f"{name}: valid")
            for problem in result["errors"]:  # type: ignore[attr-defined]
                place = f":{problem['line']}:{problem['column']}" if problem["line"] else ""
                print(f"{name}{place}: {problem['message']}")
                if problem["remedy"]:
                    print(f"    {problem['remedy']}")
    return int(Exit.DONE if all(r["valid"] for r in results) else Exit.USAGE)


def _init(args: argparse.Namespace) -> int:
    from .runner import read_notebook, run_notebook

    read_notebook(args.notebook)
    target = args.notebook.with_suffix(".glovebox.yaml")
    if target.exists() and not args.force:
        raise UsageError(f"{target} exists already.", "Edit it, or replace it with --force.")
    events: list[Event] = []
    if args.from_run:
        show.note("Running the notebook on the baseline (no inputs, no network) to see what it asks for …")
        resolution = resolve(args.notebook, baseline=True)
        events = run_notebook(args.notebook, resolution, allow_errors=True, promote=False).blocked
    text = draft_manifest(args.notebook, events)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise GloveboxError(f"{target} cannot be written: {error.strerror}.") from error
    if args.json:
        show.as_json({"manifest": str(target), "text": text})
    else:
        print(text)
        show.note(f"Written to {target}. Read it, then run: jupyter glovebox approve {args.notebook}")
    return int(Exit.DONE)


def _explain(args: argparse.Namespace) -> int:
    resolution = resolve(
        args.notebook, manifest_file=args.manifest, caller_approves=args.manifest is not None
    )
    if args.json:
        import msgspec

        plan = msgspec.to_builtins(resolution.plan)
        show.as_json(
            {
                "plan": resolution.plan.digest,
                "notice": resolution.notice,
                "grants": plan,
                "text": explain(resolution.plan, resolution.policy),
            }
        )
    else:
        if resolution.notice:
            show.note(resolution.notice + "\n")
        print(explain(resolution.plan, resolution.policy))
    return int(Exit.DONE)


def _approve(args: argparse.Namespace) -> int:
    if args.json and not args.yes:
        raise UsageError("With --json nothing is shown and nobody is asked.", "Add --yes.")
    if not args.notebook.is_file():
        raise UsageError(
            f"There is no notebook at {escape(str(args.notebook))}.", "Name an existing .ipynb file."
        )
    manifest = find_manifest(args.notebook)
    if manifest is None:
        raise UsageError(
            f"There is no manifest for {args.notebook}.", f"Draft one: jupyter glovebox init {args.notebook}"
        )
    # Compiling first: what cannot be compiled under the policy cannot be approved either.
    resolution = resolve(args.notebook, manifest_file=manifest, caller_approves=True)
    if not args.json:
        print(explain(resolution.plan, resolution.policy))
    if not args.yes and not _agreed():
        show.note("Not approved; nothing was changed.")
        return int(Exit.ERROR)
    sources = {grant.path: grant.source for grant in resolution.plan.inputs}
    approval = approvals.approve(args.notebook, manifest, sources=sources, digest=resolution.plan.manifest)
    ledger = Ledger(str(state_dir() / "ledger.sqlite3"))
    try:
        ledger.add(
            "approval",
            "",
            {"notebook": approval.notebook, "manifest": approval.manifest, "by": "command line"},
        )
    finally:
        ledger.close()
    if args.json:
        show.as_json(approval)
    else:
        print(f"\nApproved: {manifest} for {args.notebook}")
    return int(Exit.DONE)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("Approving asks a question, and there is no terminal to ask it.", "Add --yes.")
    return input("\nApprove this? [y/N] ").strip().lower() in ("y", "yes")


def _revoke(args: argparse.Namespace) -> int:
    if args.credential is not None:
        raise UsageError(
            f"There is no credential named {escape(args.credential)}: this version grants none.",
            "To take back a notebook's approval: jupyter glovebox revoke NOTEBOOK",
        )
    if args.notebook is None:
        raise UsageError("Name a notebook.", "jupyter glovebox revoke NOTEBOOK")
    done = approvals.revoke(args.notebook)
    ledger = Ledger(str(state_dir() / "ledger.sqlite3"))
    try:
        if done:
            ledger.add("revocation", "", {"notebook": str(args.notebook.resolve()), "by": "command line"})
    finally:
        ledger.close()
    if args.json:
        show.as_json({"notebook": str(args.notebook), "revoked": done})
    else:
        print(
            f"Revoked. {args.notebook} runs on the baseline from its next start; running kernels keep their grant."
            if done
            else f"{args.notebook} had no approval."
        )
    return int(Exit.DONE if done else Exit.ERROR)

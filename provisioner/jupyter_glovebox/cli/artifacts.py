"""`verify`: what the export boundary would say about files, without promoting them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from ..artifacts.verify import verify_paths
from ..errors import Exit, UsageError
from ..manifest.loading import load_manifest
from . import show


def register(subparsers: Any) -> None:
    """Add the commands of this module."""
    parser = subparsers.add_parser(
        "verify",
        help="verdicts on files, without exporting them",
        description="Look at files as the export boundary does. A folder means its entries. "
        "With --manifest its `outputs` decide, else the defaults do.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--manifest", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from ..manifest.compile import outputs_of

    for path in args.paths:
        if not path.exists() and not path.is_symlink():
            raise UsageError(f"There is nothing at {path}.", "Name existing files or folders.")
    outputs = outputs_of(load_manifest(args.manifest) if args.manifest else None)
    if outputs is None:
        raise UsageError(f"{args.manifest} has no `outputs`: nothing may leave.", "Add an `outputs` section.")
    found = [msgspec.to_builtins(artifact) for artifact in verify_paths(args.paths, outputs)]
    if args.json:
        show.as_json({"files": found})
    else:
        print(show.artifacts(found) or "No files.")
    good = all(artifact["verdict"] in ("allow", "fixed") for artifact in found)
    return int(Exit.DONE if good else Exit.ERROR)

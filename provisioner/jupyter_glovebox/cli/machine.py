"""`doctor`: what this machine can enforce."""

from __future__ import annotations

import argparse
from typing import Any

from .. import limits
from ..errors import Exit
from ..limits.base import ControlState
from ..manifest.plan import CONTROLS
from ..sandbox import doctor
from ..supervisor.checks import NEVER_WITHOUT
from . import show


def register(subparsers: Any) -> None:
    """Add the commands of this module."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can enforce, and how to fix what it cannot",
        description="Try every control for real and say how it is held: enforced, soft or off, with the fix.",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    found: dict[str, ControlState] = doctor.probe() | limits.probe()
    found.setdefault("relay", ControlState("enforced", "part of every start"))
    found.setdefault("gateway", ControlState("enforced", "no network is granted in this version"))
    found.setdefault(
        "approval", ControlState("enforced", "manifests need an approval, kept outside every sandbox")
    )
    controls = {name: found[name] for name in CONTROLS if name in found}
    versions = doctor.versions()
    usable = all(controls[name].state == "enforced" for name in NEVER_WITHOUT if name in controls)
    if args.json:
        show.as_json(
            {
                "isolation": "bubblewrap" if usable else None,
                "controls": controls,
                "versions": versions,
            }
        )
    else:
        print(show.posture(controls))
        print()
        for name, state in versions.items():
            print(f"{name}: {state.reason}" + (f"\n  {state.fix}" if state.fix else ""))
        print(
            "\nKernels can be isolated here (bubblewrap)."
            if usable
            else "\nKernels CANNOT be isolated here, and none will be started. Apply the fixes above."
        )
    return int(Exit.DONE if usable else Exit.CANNOT_ISOLATE)

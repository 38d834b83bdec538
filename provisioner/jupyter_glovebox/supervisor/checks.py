"""Small decisions of the supervisor: what it refuses, what it demands, what it watches on the host."""

from __future__ import annotations

import os

from ..errors import CannotIsolateError, RefusedError
from ..ledger.events import escape
from ..limits.base import ControlState
from ..locations import private_dir, state_dir
from ..manifest.plan import Plan
from .recorder import Recorder

NEVER_WITHOUT = (
    "user", "capabilities", "pid", "mount", "network", "ipc", "seccomp", "no_new_privileges",
    "environment", "descriptors",
)  # fmt: skip
"""Controls without which no kernel starts, whatever the manifest says."""


def refuse_unbuilt(plan: Plan) -> None:
    """Refuse what this version cannot enforce, also in plans that no compiler has seen.

    Raises:
        RefusedError: the plan grants something whose gate does not exist yet.
    """
    for name in ("network", "operations", "credentials", "devices"):
        if getattr(plan, name):
            raise RefusedError(
                f"The plan grants {name}, which this version cannot enforce.",
                f"Remove `{name}` from the manifest.",
            )


def demand(posture: dict[str, ControlState], plan: Plan) -> None:
    """Compare the measured posture with what must hold.

    Raises:
        CannotIsolateError: a control that must be enforced is not.
    """
    for name in dict.fromkeys((*NEVER_WITHOUT, *plan.require)):
        state = posture.get(name, ControlState("off", "was not measured"))
        if state.state != "enforced":
            asked = "The plan demands" if name in plan.require else "Every kernel needs"
            raise CannotIsolateError(
                f"{asked} the control `{name}`, which is {state.state} here: {state.reason}.",
                state.fix or "Run: jupyter glovebox doctor",
            )


def fixed_controls(plan: Plan, *, relay: bool) -> dict[str, ControlState]:
    """Controls that follow from the plan and from what runs, not from the host."""
    approvals: dict[str, ControlState] = {
        "none": ControlState("enforced", "nothing was granted: the baseline needs no approval"),
        "caller": ControlState("soft", "the caller of the command named the manifest"),
        "click": ControlState("soft", "approved without a one-time code"),
        "code": ControlState("enforced", "approved on the command line or with a one-time code"),
    }
    return {
        "relay": ControlState("enforced", "every message is verified and signed again")
        if relay
        else ControlState("enforced", "a command has no messages"),
        "gateway": ControlState("enforced", "no endpoint is granted, and the sandbox has no way out"),
        "approval": approvals[plan.approval],
    }


class InputWatch:
    """Sees whether granted files changed on the host after the sandbox was made."""

    def __init__(self, plan: Plan) -> None:
        self._last = {g.source: g.identity for g in plan.inputs if g.identity is not None}

    def report_changes(self, recorder: Recorder) -> None:
        """One `input-stale` event for each source that is not what it was; called at each cell start."""
        for source, known in list(self._last.items()):
            try:
                now = os.stat(source)
            except OSError:
                detail = "is gone"
            else:
                if (now.st_dev, now.st_ino, now.st_mtime_ns) == (known.device, known.inode, known.mtime_ns):
                    continue
                detail = "was replaced" if now.st_ino != known.inode else "was changed"
            del self._last[source]
            recorder.report(
                "input-stale",
                "input",
                escape(source),
                rule=f"the host's file {detail} after the kernel had started",
                suggestion="Restart the kernel to work with the current file.",
            )


def make_disk_scratch(kernel_id: str) -> str:
    """A private host folder for a scratch on disk; removed at destruction. Raises OSError, GloveboxError."""
    return str(private_dir(state_dir() / "scratch" / kernel_id))

"""What leaves: the outputs of one kernel, read from its tmpfs, verified and promoted.

The descriptor of the outputs folder is taken while the sandbox starts. It keeps the tmpfs alive after
the last process of the sandbox has gone, so results survive a crash of the kernel, and they are read
when nothing can change them any more.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from ..ledger.events import escape
from ..manifest.plan import Plan
from .recorder import Recorder


def outputs_dir(plan: Plan) -> str | None:
    """The outputs folder's absolute name inside, None when nothing may leave."""
    if plan.outputs is None:
        return None
    return os.path.normpath(os.path.join(plan.workdir, plan.outputs.path))


def destination(plan: Plan, export_dir: str | None) -> Path | None:
    """The host folder that promoted files go to."""
    if plan.outputs is None:
        return None
    if export_dir is not None:
        return Path(export_dir)
    return Path(plan.workdir) / plan.outputs.path


def _skipped(plan: Plan, root: str) -> tuple[str, ...]:
    """Names in the outputs folder that are inputs (only where the whole working folder is searched)."""
    prefix = root.rstrip("/") + "/"
    names = (name for i in plan.inputs for name in (i.path, i.source))
    return tuple(sorted({n[len(prefix) :] for n in names if n.startswith(prefix)}))


class Exporter:
    """Verifies and promotes the files of one kernel.

    Args:
        plan: decides what may leave.
        outputs_fd: descriptor of the outputs folder inside.
        export_dir: see LaunchSpec.
        snapshots: private host folder for the bytes under examination.
    """

    def __init__(
        self, plan: Plan, outputs_fd: int, export_dir: str | None, snapshots: str, kernel: str
    ) -> None:
        self._plan = plan
        self._fd = outputs_fd
        self._export_dir = export_dir
        self._snapshots = snapshots
        self._kernel = kernel

    def export(self, recorder: Recorder, *, promoting: bool) -> list[dict[str, object]]:
        """Look at everything, promote what may leave, report what stays behind.

        Returns:
            The artifacts in the shape of the `run` result.
        """
        # Not at the top: a kernel's start need not wait for what its end needs.
        from ..artifacts import intake, promote, verify

        outputs = self._plan.outputs
        root = outputs_dir(self._plan)
        target = destination(self._plan, self._export_dir)
        if outputs is None or root is None or target is None:
            return []
        with tempfile.TemporaryDirectory(prefix="snapshot-", dir=self._snapshots) as folder:
            snapshots = Path(folder)
            candidates = intake.collect(
                self._fd,
                snapshots,
                max_files=outputs.max_files,
                max_file_size=outputs.max_file_size,
                max_total_size=outputs.max_total_size,
                skip=_skipped(self._plan, root),
            )
            artifacts = verify.verify(candidates, outputs)
            if promoting:
                artifacts = promote.promote(
                    artifacts,
                    candidates,
                    target,
                    ledger=recorder.ledger,
                    kernel_id=self._kernel,
                    plan_digest=self._plan.digest,
                    notebook=self._plan.notebook,
                    within=None if self._export_dir is not None else Path(self._plan.workdir),
                )
        if promoting:
            for artifact in artifacts:
                if artifact.exported_to is None:
                    reasons = "; ".join(f"{r.code}: {r.message}" for r in artifact.reasons)
                    recorder.report(
                        "left-behind",
                        "export",
                        escape(artifact.path),
                        rule=f"verdict {artifact.verdict}",
                        suggestion=reasons or "Look at it with: jupyter glovebox verify",
                    )
        return [msgspec.to_builtins(artifact) for artifact in artifacts]

"""Cleaning up after supervisors that were killed: limits, folders, and the usage record they owed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from .. import limits
from ..errors import GloveboxError
from ..ledger.events import CleanupStep, UsageRecord
from ..ledger.store import Ledger
from ..locations import runtime_dir, state_dir
from .folders import remove_tree
from .state import KernelState, alive, read_states


def sweep_kernel(state: KernelState) -> UsageRecord:
    """Remove what a dead supervisor left, and write the record with `closed_by: sweep`."""
    gone = limits.sweep(state.limiter)
    scratch = state_dir() / "scratch" / state.kernel_id
    folders = [folder for folder in (state.folder, str(scratch)) if Path(folder).exists()]
    left = [folder for folder in folders if not remove_tree(folder)]
    record = UsageRecord(
        kernel_id=state.kernel_id,
        notebook=state.notebook,
        plan=state.plan,
        started=state.started,
        ended=time.time(),
        closed_by="sweep",
        usage=state.usage,
        isolation=state.isolation,
        cleanup={
            "processes": CleanupStep(
                verified=gone.verified, detail="the sandbox died with its supervisor; " + gone.detail
            ),
            "cgroup": gone,
            "credentials": CleanupStep(verified=True, detail="no credential was granted"),
            "storage": CleanupStep(verified=not left, detail=f"left: {left}" if left else "folders removed"),
            "sockets": CleanupStep(verified=not left, detail="went with the runtime folder"),
        },
    )
    ledger = Ledger(state.ledger)
    try:
        ledger.add_usage(record)
    finally:
        ledger.close()
    return record


def sweep_dead(*, only: str | None = None) -> list[UsageRecord]:
    """Sweep every dead supervisor of this user (or the kernel `only`). Called before each start."""
    records = []
    for state in read_states(runtime_dir()):
        if (only is None or state.kernel_id == only) and not alive(state):
            with contextlib.suppress(GloveboxError):
                records.append(sweep_kernel(state))
    if only is None:
        _sweep_scratch()
    return records


def _sweep_scratch() -> None:
    """Scratch folders on disk that no supervisor knows: what one of them could not remove."""
    try:
        found = os.listdir(state_dir() / "scratch")
    except FileNotFoundError:
        return
    known = {state.kernel_id for state in read_states(runtime_dir())}  # a state is there before its scratch
    for name in found:
        if name not in known:
            remove_tree(str(state_dir() / "scratch" / name))

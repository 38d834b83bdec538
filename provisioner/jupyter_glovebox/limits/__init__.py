"""Limits: one kernel's memory, processor, process and time budgets, held by the best means here."""

from __future__ import annotations

from .choosing import choose, refuse_reason, sweep
from .trial import probe

__all__ = ["choose", "probe", "refuse_reason", "sweep"]

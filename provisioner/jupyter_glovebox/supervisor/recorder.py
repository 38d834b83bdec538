"""Turns facts of one kernel into ledger events and hands them to the manager. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from ..errors import GloveboxError
from ..ledger.events import Cell, Event, EventClass, Severity, UsageRecord
from ..ledger.store import Ledger
from .channel import Channel
from .output import KernelOutput
from .spec import LaunchSpec, Notice


class Recorder:
    """Writes to the ledger first, then tells the manager.

    Attributes:
        blocked: how many attempts were blocked so far.
        current_cell: gives the running cell.
        complete_cell: adds the execution count, for which it may wait a moment.
    """

    def __init__(self, spec: LaunchSpec, channel: Channel) -> None:
        self._spec = spec
        self._digest = spec.plan.digest
        self._channel = channel
        self._lock = threading.Lock()
        self._ledger = Ledger(spec.ledger)
        self.blocked = 0
        self.current_cell: Callable[[], Cell | None] = lambda: None
        self.complete_cell: Callable[[Cell], Cell] = lambda cell: cell

    @property
    def ledger(self) -> Ledger:
        """The store, for those that write verdicts."""
        return self._ledger

    def add(self, event: Event) -> None:
        """Store an event and send it on; called from any thread."""
        if event.cell is not None:
            event = msgspec.structs.replace(event, cell=self.complete_cell(event.cell))
        with self._lock:
            try:
                stored = self._ledger.add_event(event)
            except GloveboxError as error:
                # The access stays denied; only its record is lost, and that is said aloud.
                KernelOutput._write(f"glovebox: an event could not be stored: {error}\n")
                stored = event
            if event.event_class not in ("left-behind", "cleanup", "observation", "input-stale"):
                self.blocked += event.count
        self._channel.send(Notice(event=stored), droppable=True)

    def report(
        self,
        event_class: EventClass,
        operation: str,
        target: str,
        *,
        rule: str = "",
        suggestion: str = "",
        severity: Severity = "warning",
        count: int = 1,
    ) -> None:
        """Make an event of this kernel and `add` it."""
        self.add(
            Event(
                time=time.time(),
                event_class=event_class,
                operation=operation,
                target=target,
                severity=severity,
                count=count,
                rule=rule,
                suggestion=suggestion,
                kernel_id=self._spec.kernel_id,
                notebook=self._spec.plan.notebook,
                plan=self._digest,
                cell=self.current_cell(),
            )
        )

    def add_usage(self, record: UsageRecord) -> None:
        """Store the usage record; a ledger that cannot take it is said aloud."""
        with self._lock:
            try:
                self._ledger.add_usage(record)
            except GloveboxError as error:
                KernelOutput._write(f"glovebox: the usage record could not be stored: {error}\n")

    def close(self) -> None:
        """Close the ledger."""
        with self._lock:
            self._ledger.close()

"""Which cell runs: followed from the messages that pass the relay.

A request counts as running from the moment it is forwarded to an idle kernel, since its first access may
come before the kernel has said that it started. The execution count follows a moment later; `complete`
waits for it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ..ledger.events import Cell

_MOST = 1000
_COUNT_SECONDS = 0.2


class Request(NamedTuple):
    """An execute request: who sent it (routing identities), and its header."""

    identities: list[bytes]
    header: dict[str, Any]
    cell: Cell


class RunningCells:
    """One thread (the relay's) writes; any thread reads `current` and calls `complete`.

    Args:
        on_change: called with the running cell, or None, when it is another one.
    """

    def __init__(self, on_change: Callable[[Cell | None], None]) -> None:
        self._on_change = on_change
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._counted: OrderedDict[str, Cell] = OrderedDict()
        self.current: Cell | None = None

    @property
    def running(self) -> Request | None:
        """The request that runs."""
        return next(iter(self._requests.values()), None)

    def requested(
        self, identities: list[bytes], header: dict[str, Any], index: int | None, cell_id: str | None
    ) -> None:
        """A client's request goes to the kernel; it waits behind those that are there."""
        msg_id = str(header["msg_id"])
        cell = Cell(execution_count=None, msg_id=msg_id, index=index, cell_id=cell_id)
        self._requests[msg_id] = Request(identities, header, cell)
        while len(self._requests) > _MOST:
            self._requests.popitem(last=False)
        self._follow()

    def started(self, msg_id: str, execution_count: int) -> None:
        """The kernel says that it runs a request under this count."""
        request = self._requests.get(msg_id)
        if request is None:
            return  # not a request of one of our clients: it names no cell
        cell = msgspec.structs.replace(request.cell, execution_count=execution_count)
        self._requests[msg_id] = request._replace(cell=cell)
        # A subshell may overtake: what the kernel started last is what runs.
        self._requests.move_to_end(msg_id, last=False)
        self._counted[msg_id] = cell
        while len(self._counted) > _MOST:
            self._counted.popitem(last=False)
        self._follow()

    def ended(self, msg_id: str) -> None:
        """The kernel is done with a request, or has refused it."""
        if self._requests.pop(msg_id, None) is not None:
            self._follow()

    def _follow(self) -> None:
        request = self.running
        before, self.current = self.current, request.cell if request else None
        if (before and before.msg_id) != (self.current and self.current.msg_id):
            self._on_change(self.current)

    def complete(self, cell: Cell) -> Cell:
        """The cell with its execution count, which may come a moment after its first access."""
        deadline = time.monotonic() + _COUNT_SECONDS
        while cell.execution_count is None:
            known = self._counted.get(cell.msg_id)
            if known is not None:
                return known
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return cell

"""Sandboxes: one module per isolation behind the interface in `base`. `start` chooses by the plan."""

from __future__ import annotations

from .base import Request, Sandbox, SandboxError

__all__ = ["start"]


def start(request: Request) -> Sandbox:
    """Build the sandbox that `request.plan.isolation` names; its command waits for `release`.

    Must be called from the main thread, before other threads exist (it forks).

    Raises:
        SandboxError: it could not be built; nothing of it is left.
    """
    if request.plan.isolation == "bubblewrap":
        from . import bubblewrap

        return bubblewrap.start(request)
    raise SandboxError(
        "validation",
        f"The isolation {request.plan.isolation} is not available in this version.",
        "Use `isolation: bubblewrap`, where policy allows it.",
    )

"""Which plan belongs to which kernel, in the memory of the managing process.

Whoever resolved a notebook (the command line, later the server extension) binds the result to a kernel
id here before the kernel starts; nothing that a client, a notebook or a kernelspec says can.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .manifest.compile import Resolution, resolve


@dataclass
class Grant:
    """A resolved plan bound to one kernel id.

    Attributes:
        resolution: plan, manifest file and notice.
        export_dir: where promoted outputs go, None for the notebook's folder.
        promote: promote verified outputs at the end.
        results: filled at the end of each life of the kernel: `launched`, `ended`, `closed` messages.
    """

    resolution: Resolution
    export_dir: str | None = None
    promote: bool = True
    results: dict[str, Any] = field(default_factory=dict)


_grants: dict[str, Grant] = {}


def bind(kernel_id: str, grant: Grant) -> None:
    """Bind a grant to a kernel id, once.

    Raises:
        ValueError: the id has a grant already.
    """
    if kernel_id in _grants:
        raise ValueError(f"kernel {kernel_id} has a grant already")
    _grants[kernel_id] = grant


def drop(kernel_id: str) -> None:
    """Forget a grant; an unknown id is not an error."""
    _grants.pop(kernel_id, None)


def under_server() -> bool:
    """Whether this process is a Jupyter server, where the environment names no notebook."""
    module = sys.modules.get("jupyter_server.serverapp")
    return bool(module and module.ServerApp.initialized())


def grant_for(kernel_id: str, *, cwd: str, env: dict[str, str]) -> Grant:
    """The grant bound to `kernel_id`, else the one that `JUPYTER_GLOVEBOX_NOTEBOOK` names, else the baseline.

    Args:
        kernel_id: the kernel's id.
        cwd: folder the kernel was to start in.
        env: the environment the client gave.

    Raises:
        GloveboxError: the notebook, its manifest or the policy is wrong, or policy refuses the baseline.
    """
    if bound := _grants.get(kernel_id):
        return bound
    named = None if under_server() else env.get("JUPYTER_GLOVEBOX_NOTEBOOK")
    if named:
        return Grant(resolve(Path(os.path.join(cwd, named))))
    return Grant(resolve(None, workdir=Path(cwd)))

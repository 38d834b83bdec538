"""Fixtures with real kernels in real sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_glovebox import grants
from jupyter_glovebox.ledger.events import Event, UsageRecord
from jupyter_glovebox.ledger.store import Ledger
from jupyter_glovebox.locations import state_dir
from jupyter_glovebox.manifest.compile import resolve

from .support import Kernel, new_manager


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """`start(manifest_text=None, files={}, **start_kernel_arguments)` gives a running kernel in `tmp_path/work`."""
    kernels: list[Kernel] = []

    def _start(
        manifest: str | None = None,
        *,
        files: dict[str, bytes] | None = None,
        spec: KernelSpec | None = None,
        manager_class: type = KernelManager,
        **arguments: Any,
    ) -> Kernel:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        for name, content in (files or {}).items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        manager = new_manager(spec, manager_class=manager_class)
        if manifest is not None:
            (work / "test.glovebox.yaml").write_text(manifest)
            resolution = resolve(
                None, manifest_file=work / "test.glovebox.yaml", workdir=work, caller_approves=True
            )
            grants.bind(manager.kernel_id, grants.Grant(resolution))
        kernel = Kernel(manager)
        kernels.append(kernel)
        manager.start_kernel(cwd=str(work), **arguments)
        return kernel

    yield _start
    for kernel in kernels:
        kernel.close()
        grants.drop(kernel.kernel_id)


@pytest.fixture
def ledger() -> Callable[[str], tuple[list[Event], list[UsageRecord]]]:
    """`ledger(kernel_id)` gives the events and usage records of a kernel."""

    def _read(kernel_id: str) -> tuple[list[Event], list[UsageRecord]]:
        store = Ledger(str(state_dir() / "ledger.sqlite3"))
        try:
            return store.events(kernel_id=kernel_id)[0], store.usage(kernel_id=kernel_id)
        finally:
            store.close()

    return _read

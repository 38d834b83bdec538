"""Helpers for tests with real kernels; also imported by the processes that tests start."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_glovebox.provisioner import GloveboxProvisioner

PATIENCE = 60


class Kernel:
    """One sandboxed kernel with a connected client."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client: BlockingKernelClient | None = None

    @property
    def kernel_id(self) -> str:
        return str(self.manager.kernel_id)

    def connect(self) -> BlockingKernelClient:
        client = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE)
        self.client = client
        return client

    def run(self, code: str, *, timeout: float = PATIENCE) -> tuple[str, dict[str, Any]]:
        """What the cell printed (stdout, stderr, last value) and its reply's content."""
        client = self.client or self.connect()
        out: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                out.append(content["text"])
            elif message["msg_type"] == "execute_result":
                out.append(content["data"]["text/plain"])

        reply = client.execute_interactive(code, output_hook=hook, timeout=timeout)
        return "".join(out), reply["content"]

    def close(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
            self.client = None
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


def python_spec(argv: list[str] | None = None) -> KernelSpec:
    return KernelSpec(
        argv=argv or [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="Python",
        language="python",
    )


def new_manager(spec: KernelSpec | None = None, *, manager_class: type = KernelManager) -> KernelManager:
    manager = manager_class(kernel_id=str(uuid.uuid4()))
    spec = spec or python_spec()
    manager._kernel_spec = spec
    manager.provisioner = GloveboxProvisioner(kernel_id=manager.kernel_id, kernel_spec=spec, parent=manager)
    return manager


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Poll until `condition()` is true; its value."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience} s for: {what}"
        time.sleep(0.02)
    return value


def processes_with(marker: str) -> list[int]:
    """Host pids whose command line holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found

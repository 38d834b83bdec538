"""Plain local provisioner against glovebox, interleaved, medians.

    python tests/benchmarks/kernel.py [--runs 15]

Per run and arm: start to the first kernel_info reply, 200 executions of `pass`, `import pandas`, writing
and reading 1 GB in the working folder, shutdown until nothing is left. Prints one table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import LocalProvisioner
from jupyter_glovebox import grants
from jupyter_glovebox.manifest.compile import resolve
from jupyter_glovebox.provisioner import GloveboxProvisioner

MANIFEST = """\
version: 1
name: benchmark
scratch: {size: 1200M}
budgets: {memory: 4G, cpus: 2}
"""
WRITE = """
block = b'x' * (1 << 20)
with open('big', 'wb') as f:
    for _ in range(1024):
        f.write(block)
"""
READ = """
with open('big', 'rb', buffering=0) as f:
    buffer = bytearray(1 << 20)
    while f.readinto(buffer):
        pass
"""


def _manager(arm: str) -> KernelManager:
    manager = KernelManager(kernel_id=str(uuid.uuid4()))
    spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="Python", language="python",
    )  # fmt: skip
    manager._kernel_spec = spec
    if arm == "plain":
        manager.transport = "ipc"
        manager.ip = f"{tempfile.mkdtemp(dir='/tmp')}/k"
    kind = GloveboxProvisioner if arm == "glovebox" else LocalProvisioner
    manager.provisioner = kind(kernel_id=manager.kernel_id, kernel_spec=spec, parent=manager)
    return manager


def _one(arm: str, folder: Path) -> dict[str, float]:
    took: dict[str, float] = {}
    manager = _manager(arm)
    if arm == "glovebox":
        (folder / "b.glovebox.yaml").write_text(MANIFEST)
        resolution = resolve(
            None, manifest_file=folder / "b.glovebox.yaml", workdir=folder, caller_approves=True
        )
        grants.bind(manager.kernel_id, grants.Grant(resolution))

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        took[name] = time.perf_counter() - begin

    begin = time.perf_counter()
    manager.start_kernel(cwd=str(folder))
    client = manager.client()
    client.start_channels()
    client.kernel_info()
    client.get_shell_msg(timeout=60)
    took["start to kernel_info"] = time.perf_counter() - begin
    client.wait_for_ready(timeout=60)

    def run(code: str) -> None:
        reply = client.execute_interactive(code, timeout=120)
        assert reply["content"]["status"] == "ok", reply["content"]

    run("pass")
    timed("200 round trips of `pass`", lambda: [run("pass") for _ in range(200)])
    timed("import pandas", lambda: run("import pandas"))
    timed("write 1 GB", lambda: run(WRITE))
    timed("read 1 GB", lambda: run(READ))
    run("import os; os.unlink('big')")
    client.stop_channels()
    timed("shutdown to nothing left", lambda: manager.shutdown_kernel())
    return took


def main() -> None:
    """Run the arms in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {"plain": {}, "glovebox": {}}
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.runs + 1):
            for arm in ("plain", "glovebox") if number % 2 else ("glovebox", "plain"):
                folder = Path(name) / f"{arm}{number}"
                folder.mkdir()
                for what, seconds in _one(arm, folder).items():
                    if number:  # the first round warms the page cache
                        results[arm].setdefault(what, []).append(seconds)
    print(f"medians of {args.runs} interleaved runs, in milliseconds\n")
    print(f"{'':28}{'plain':>10}{'glovebox':>10}{'ratio':>8}")
    for what in results["plain"]:
        plain, ours = (statistics.median(results[arm][what]) * 1000 for arm in ("plain", "glovebox"))
        print(f"{what:28}{plain:>10.1f}{ours:>10.1f}{ours / plain:>8.2f}")


if __name__ == "__main__":
    main()

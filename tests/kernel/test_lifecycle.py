"""The life of a kernel: every way it starts and ends, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop, run_sync
from jupyter_glovebox.locations import runtime_dir
from jupyter_glovebox.provisioner import GloveboxProvisioner
from jupyter_glovebox.supervisor.state import read_states

from .support import Kernel, new_manager, processes_with, python_spec, until

Start = Callable[..., Kernel]


def _supervisor(kernel: Kernel) -> int:
    (pid,) = [s.supervisor_pid for s in read_states(runtime_dir()) if s.kernel_id == kernel.kernel_id]
    return pid


def _no_folder() -> bool:
    return not list(runtime_dir().iterdir())


def test_runs_and_ends_clean(start: Start, ledger: Any) -> None:
    kernel = start()
    assert kernel.run("6 * 7")[0] == "42"
    kernel.client.stop_channels()
    kernel.client = None
    kernel.manager.shutdown_kernel()
    assert not kernel.manager.is_alive()
    _, records = ledger(kernel.kernel_id)
    (record,) = records
    assert record.closed_by == "shutdown"
    assert all(step.verified for step in record.cleanup.values()), record.cleanup
    assert set(record.cleanup) == {"processes", "cgroup", "credentials", "storage", "sockets"}
    assert record.usage.cpu_seconds > 0
    assert record.usage.peak_memory_bytes > 10 << 20
    assert _no_folder()


def test_stays_alive_idle_and_knows_no_parent(start: Start) -> None:
    kernel = start()
    # ipykernel's parent poller looks once a second.
    time.sleep(3)
    out, _ = kernel.run("import os; print(os.environ['JPY_PARENT_PID'], os.getppid(), os.getpid())")
    assert out.split() == ["1", "1", "2"]


def test_interrupt_reaches_the_cell_and_its_child_and_nothing_else(start: Start) -> None:
    kernel = start()
    marker = f"{uuid.uuid4().int % 10**8 + 10**8}"
    kernel.run(f"import subprocess; bg = subprocess.Popen(['sleep', '{marker}'], start_new_session=True)")
    client = kernel.client
    client.execute("import subprocess; subprocess.run(['sleep', '600'])")
    until(lambda: [p for p in processes_with("sleep") if _cmdline(p) == ["sleep", "600"]], "the child")
    kernel.manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=60)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert kernel.manager.is_alive()
    assert kernel.run("bg.poll() is None")[0] == "True"


def _cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    except OSError:
        return []


def test_children_die_with_the_kernel(start: Start) -> None:
    kernel = start()
    marker = f"{uuid.uuid4().int % 10**8 + 10**8}"
    kernel.run(
        f"import subprocess; subprocess.Popen(['setsid', '-f', 'sleep', '{marker}'], start_new_session=True).wait()"
    )
    assert until(lambda: processes_with(marker), "the orphan")
    kernel.close()
    assert processes_with(marker) == []


def test_restart_gives_a_clean_sandbox_with_the_same_grant(start: Start, ledger: Any) -> None:
    manifest = "version: 1\nname: t\ninputs: [data.txt]\n"
    kernel = start(manifest, files={"data.txt": b"hello"})
    assert kernel.run("open('new.txt', 'w').write('x'); print(open('data.txt').read())")[0].startswith(
        "hello"
    )
    for now in (True, False):
        kernel.client.stop_channels()
        kernel.client = None
        kernel.manager.restart_kernel(now=now)
        out, _ = kernel.run("import os; print(os.path.exists('new.txt'), open('data.txt').read())")
        assert out == "False hello\n"
    kernel.close()
    assert [r.closed_by for r in ledger(kernel.kernel_id)[1]] == ["kill", "restart", "kill"]


def test_a_second_start_ends_the_first_sandbox(start: Start, ledger: Any) -> None:
    kernel = start()
    first = _supervisor(kernel)
    kernel.manager.start_kernel()
    assert _supervisor(kernel) != first
    assert kernel.run("1 + 1")[0] == "2"
    assert [r.closed_by for r in ledger(kernel.kernel_id)[1]] == ["restart"]


def test_a_connected_client_survives_a_restart(start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    assert kernel.run("'x' in globals()")[0] == "False"


async def test_restarts_by_itself_with_the_same_sandbox() -> None:
    from jupyter_client.ioloop import AsyncIOLoopKernelManager

    manager = new_manager(manager_class=AsyncIOLoopKernelManager)
    await manager.start_kernel()
    try:
        for _ in range(2):
            (before,) = [s for s in read_states(runtime_dir()) if s.kernel_id == manager.kernel_id]
            client = manager.client()
            client.start_channels()
            await client.wait_for_ready(timeout=60)
            client.execute("import os; os.kill(os.getpid(), 9)")
            deadline = time.monotonic() + 60
            import asyncio

            while True:
                states = [s for s in read_states(runtime_dir()) if s.kernel_id == manager.kernel_id]
                if states and states[0].supervisor_pid != before.supervisor_pid:
                    break
                assert time.monotonic() < deadline, "no automatic restart"
                await asyncio.sleep(0.1)
            client.stop_channels()
            client = manager.client()
            client.start_channels()
            await client.wait_for_ready(timeout=60)
            client.stop_channels()
            assert states[0].plan == before.plan
    finally:
        await manager.shutdown_kernel(now=True)
    assert _no_folder()


def test_program_that_does_not_exist(start: Start) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        start(spec=python_spec(["/nowhere/python", "-f", "{connection_file}"]))
    assert "/nowhere/python" in str(caught.value)
    assert _no_folder()


def test_program_that_cannot_run(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "kernel"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError):
        start(spec=python_spec([str(program)]))
    assert _no_folder()


def test_program_that_ends_at_once_says_why(start: Start, ledger: Any) -> None:
    kernel = start(spec=python_spec([sys.executable, "-c", "raise SystemExit('no kernel today')"]))
    until(lambda: not kernel.manager.is_alive(), "the end")
    process = kernel.manager.provisioner._process
    assert "no kernel today" in process.ended.message
    kernel.close()
    (record,) = ledger(kernel.kernel_id)[1]
    assert record.exit_status == 1


def test_start_in_a_thread_that_ends(start: Start) -> None:
    made: list[Kernel] = []

    def work() -> None:
        loop = ensure_event_loop()  # the one jupyter_client would make, and leave open
        made.append(start())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    time.sleep(2)
    assert made[0].manager.is_alive()
    assert made[0].run("1 + 1")[0] == "2"


def test_dropped_manager_ends_its_sandbox() -> None:
    manager = new_manager()
    manager.start_kernel()
    (state,) = read_states(runtime_dir())
    manager.provisioner._process._finalizer()
    until(lambda: not Path(f"/proc/{state.supervisor_pid}").exists(), "the supervisor's end")
    until(_no_folder, "the folder's end")
    manager.cleanup_resources()


def test_cleanup_is_idempotent_and_harmless_before_a_launch(start: Start) -> None:
    manager = new_manager()
    run_sync(manager.provisioner.cleanup)()
    run_sync(manager.provisioner.cleanup)(restart=True)
    manager.start_kernel()
    assert manager.is_alive()
    manager.shutdown_kernel(now=True)
    run_sync(manager.provisioner.cleanup)()
    assert not manager.is_alive()


async def test_without_a_manager_and_without_env() -> None:
    """A provisioner used alone: no parent, no `env`, no `cwd`."""
    spec = python_spec([sys.executable, "-c", "import time; time.sleep(60)"])
    provisioner = GloveboxProvisioner(kernel_id=str(uuid.uuid4()), kernel_spec=spec, parent=None)
    arguments = await provisioner.pre_launch()
    arguments.pop("env", None)
    await provisioner.launch_kernel(**arguments)
    assert await provisioner.poll() is None
    await provisioner.kill()
    await provisioner.wait()
    await provisioner.cleanup()
    assert not provisioner.has_process
    assert _no_folder()


async def test_async_manager(start: Start) -> None:
    manager = new_manager(manager_class=AsyncKernelManager)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    reply = await client.execute_interactive("1", timeout=60)
    assert reply["content"]["status"] == "ok"
    client.stop_channels()
    await manager.shutdown_kernel()
    assert _no_folder()


_SERVER = """
import sys, time
sys.path.insert(0, {tests!r})
from support import new_manager
manager = new_manager()
manager.start_kernel()
client = manager.client(); client.start_channels(); client.wait_for_ready(timeout=60)
client.execute_interactive(
    "import subprocess; p = subprocess.Popen(['sleep', {marker!r}], start_new_session=True)", timeout=60
)
print(manager.kernel_id, flush=True)
time.sleep(600)
"""


def test_sigkill_of_the_server_ends_everything(ledger: Any) -> None:
    marker = f"{uuid.uuid4().int % 10**8 + 10**8}"
    code = _SERVER.format(tests=str(Path(__file__).parent), marker=marker)
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with server:
        kernel_id = server.stdout.readline().strip()
        try:
            until(lambda: [p for p in processes_with(marker) if _cmdline(p)[:1] == ["sleep"]], "the child")
        finally:
            server.kill()
    until(lambda: not [p for p in processes_with(marker) if _cmdline(p)[:1] == ["sleep"]], "the child's end")
    until(_no_folder, "the folder's end")
    (record,) = until(lambda: ledger(kernel_id)[1], "the record")
    assert record.closed_by == "manager-gone"
    assert all(step.verified for step in record.cleanup.values()), record.cleanup


def test_sigkill_of_the_supervisor_ends_everything(start: Start, ledger: Any) -> None:
    kernel = start()
    marker = f"{uuid.uuid4().int % 10**8 + 10**8}"
    kernel.run(f"import subprocess; subprocess.Popen(['sleep', '{marker}'], start_new_session=True)")
    assert processes_with(marker)
    os.kill(_supervisor(kernel), signal.SIGKILL)
    until(lambda: not processes_with(marker), "the child's end")
    until(lambda: not kernel.manager.is_alive(), "the manager's notice")
    kernel.close()
    (record,) = ledger(kernel.kernel_id)[1]
    assert record.closed_by == "sweep"
    assert all(step.verified for step in record.cleanup.values()), record.cleanup
    assert _no_folder()


def test_the_next_start_sweeps_after_a_killed_pair(start: Start, ledger: Any) -> None:
    """Server and supervisor both killed: whoever starts next writes the record."""
    marker = "1" + uuid.uuid4().hex[:8]
    code = _SERVER.format(tests=str(Path(__file__).parent), marker=str(int(marker, 16)))
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with server:
        kernel_id = server.stdout.readline().strip()
        (state,) = [s for s in read_states(runtime_dir()) if s.kernel_id == kernel_id]
        os.kill(state.supervisor_pid, signal.SIGKILL)
        server.kill()
    assert ledger(kernel_id)[1] == []
    start()
    (record,) = ledger(kernel_id)[1]
    assert record.closed_by == "sweep"


def test_works_with_a_long_home(tmp_path: Path) -> None:
    home = tmp_path / ("h" * 120) / ("o" * 80)
    home.mkdir(parents=True)
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from support import new_manager
        manager = new_manager()
        manager.start_kernel()
        client = manager.client(); client.start_channels(); client.wait_for_ready(timeout=60)
        client.execute("import os; print(os.path.expanduser('~'), os.listdir(os.path.expanduser('~')))")
        assert client.get_shell_msg(timeout=60)['content']['status'] == 'ok'
        client.stop_channels()
        manager.shutdown_kernel()
    """)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "JUPYTER_GLOVEBOX_"))} | {
        "HOME": str(home)
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_servers_secrets_are_not_inside(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = uuid.uuid4().hex
    monkeypatch.setenv("OPENAI_API_KEY", canary)
    monkeypatch.setenv("JUPYTER_TOKEN", canary)
    code = f"""
import glob
found = []
for name in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try:
        if {canary[:16]!r} + {canary[16:]!r} in open(name, 'rb').read().decode('latin-1'):
            found.append(name)
    except OSError as error:
        pass
print(found, len(glob.glob('/proc/[0-9]*')))
"""
    # Positive control: outside, the canary is where an attacker would look.
    assert canary in Path("/proc/self/environ").read_text() or canary in os.environ.values()
    kernel = start(env=dict(os.environ))
    out, reply = kernel.run(code)
    assert reply["status"] == "ok"
    assert out.startswith("[] "), out


def test_two_kernels_see_nothing_of_each_other(start: Start) -> None:
    one, two = start(), start()
    one.run("open('/tmp/note', 'w').write('secret'); open('/dev/shm/note', 'w').write('secret')")
    out, _ = two.run(
        "import os, glob; print(os.path.exists('/tmp/note'), os.path.exists('/dev/shm/note'), "
        "len(glob.glob('/proc/[0-9]*')))"
    )
    assert out == "False False 2\n"

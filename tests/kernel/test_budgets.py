"""Each budget that ends a kernel is named: to the client, and in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .support import Kernel, until

Start = Callable[..., Kernel]

_MANIFEST = "version: 1\nname: budgets\nscratch: {size: 32M}\nbudgets: {%s}\n"


@pytest.mark.parametrize(
    ("budget", "setting", "code"),
    [
        ("memory", "memory: 300M", "x = bytearray(2 << 30)\nimport time; time.sleep(60)"),
        ("cpu_time", "cpu_time: 4s", "while True: pass"),
        ("wall_time", "wall_time: 6s", "import time; time.sleep(600)"),
    ],
)
def test_the_budget_is_named(start: Start, ledger: Any, budget: str, setting: str, code: str) -> None:
    kernel = start(_MANIFEST % setting)
    client = kernel.connect()
    errors: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "error":
            errors.append(f"{message['content']['ename']}: {message['content']['evalue']}")

    reply = client.execute_interactive(code, output_hook=hook, timeout=60)
    assert reply["content"]["status"] == "error"
    assert reply["content"]["ename"] == "GloveboxBudget"
    named = budget.replace("_", " ")
    assert named in reply["content"]["evalue"].replace("_", " ")
    assert errors
    until(lambda: not kernel.manager.is_alive(), "the end")
    kernel.close()
    events, (record,) = ledger(kernel.kernel_id)
    assert record.closed_by == f"budget:{budget}"
    limits = [e for e in events if e.event_class == "limit" and e.operation == budget]
    assert limits
    assert limits[0].cell is not None
    assert all(step.verified for step in record.cleanup.values()), record.cleanup


def test_a_fork_bomb_is_refused_or_named(start: Start, ledger: Any) -> None:
    kernel = start(_MANIFEST % "processes: 64")
    code = """
import os, time, signal
children = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            time.sleep(60); os._exit(0)
        children.append(pid)
except BlockingIOError as error:
    print(len(children) < 64, error.errno)
for pid in children:
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
"""
    if kernel.manager.provisioner._process.launched.posture["processes"].state == "enforced":
        assert kernel.run(code)[0] == "True 11\n"
        assert kernel.run("1 + 1")[0] == "2"
    else:
        # Watched, not held: a bomb that outgrows the budget between two looks ends the kernel, by name.
        _, reply = kernel.run(code.replace("while True", "for _ in range(500)"))
        assert reply["ename"] == "GloveboxBudget"
    until(lambda: [e for e in ledger(kernel.kernel_id)[0] if e.operation == "processes"], "the event")


def test_writable_places_are_bounded(start: Start) -> None:
    kernel = start("version: 1\nname: s\nscratch: {size: 8M}\noutputs: {max_total_size: 4M}\n")
    code = """
def fill(folder, most):
    block, written = b'x' * (1 << 20), 0
    with open(folder + '/fill', 'wb') as f:
        try:
            while written < most:
                f.write(block); f.flush(); written += 1 << 20
        except OSError as error:
            return written >> 20, error.errno
    return 'unbounded'
import os
print(fill('.', 64 << 20), fill('outputs', 64 << 20))
for place in ('/', '/dev', '/run', '/etc', '/usr'):
    try:
        open(place + '/x', 'w'); print('WROTE', place)
    except OSError: pass
"""
    out, reply = kernel.run(code)
    assert reply["status"] == "ok"
    (scratch, outputs) = eval(out.strip().replace(") (", "),("))
    assert scratch[1] == outputs[1] == 28
    assert scratch[0] <= 8
    assert outputs[0] <= 4


def test_idle_costs_nothing_much(start: Start) -> None:
    """The supervisor's loops sleep: an idle kernel's supervisor uses hardly any processor time."""
    from jupyter_glovebox.locations import runtime_dir
    from jupyter_glovebox.supervisor.state import read_states

    kernel = start()
    kernel.connect()
    (state,) = read_states(runtime_dir())

    def ticks() -> int:
        text = Path(f"/proc/{state.supervisor_pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    time.sleep(1)
    before = ticks()
    time.sleep(4)
    assert ticks() - before <= 12, "more than 3 % of a processor while idle"

"""Run one command in a sandbox and wait for it: `run(...)` here, or as a program (JSON in, JSON out).

Nothing but the sandbox is under test, so the notify listener is served by a loop that lets every call
through to the kernel: what is refused is refused by namespaces, mounts, seccomp and Landlock alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_glovebox import sandbox
from jupyter_glovebox.manifest.plan import Budgets, InputGrant, Outputs, Plan, Scratch
from jupyter_glovebox.sandbox.base import Environment, Request, Sandbox

_RECV = 0xC0502100  # SECCOMP_IOCTL_NOTIF_RECV
_SEND = 0xC0182101  # SECCOMP_IOCTL_NOTIF_SEND
MIB = 1 << 20


def let_through(listener: int) -> None:
    """Answer every notification with CONTINUE until the last task has gone."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while not waiting.poll()[0][1] & select.POLLHUP:
        message = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECV, message)
            ident = struct.unpack_from("Q", message)[0]
            fcntl.ioctl(listener, _SEND, bytearray(struct.pack("QqiI", ident, 0, 0, 1)))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINTR):
                raise


def grant(path: str, source: str | None = None, **more: Any) -> InputGrant:
    source = source or os.path.realpath(path)
    return InputGrant(path=path, source=source, kind="directory" if os.path.isdir(source) else "file", **more)


def make_plan(workdir: str, inputs: tuple[InputGrant, ...] = (), **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "name": "test", "baseline": True, "notebook": None, "workdir": workdir, "isolation": "bubblewrap",
        "workload": "generated-code", "inputs": inputs, "scratch": Scratch(size=4 * MIB),
        "outputs": Outputs(max_files=9, max_file_size=MIB, max_total_size=4 * MIB, types=()),
        "budgets": Budgets(
            memory=1 << 30, cpus=1, cpu_time=60, wall_time=60, processes=64, open_files=256, display=1
        ),
        "policy": "sha256:test",
    }  # fmt: skip
    return Plan(**(values | changes))


def make_request(argv: list[str], plan: Plan, streams: tuple[int, int, int], **changes: Any) -> Request:
    values: dict[str, Any] = {
        "plan": plan, "environment": Environment(binds=(), path=("/usr/bin", "/bin")), "argv": tuple(argv),
        "env": {"HOME": os.path.expanduser("~"), "PATH": "/usr/bin:/bin"}, "files": {}, "stdin": streams[0],
        "stdout": streams[1], "stderr": streams[2], "enter": lambda: None, "tmp_size": 4 * MIB,
        "shm_size": 4 * MIB, "home_size": 4 * MIB, "outputs_size": 4 * MIB,
    }  # fmt: skip
    return Request(**(values | changes))


@contextmanager
def started(argv: list[str], plan: Plan, **changes: Any) -> Iterator[tuple[Sandbox, int]]:
    """A released sandbox, and the descriptor of what its command prints."""
    null = os.open("/dev/null", os.O_RDONLY)
    read, write = os.pipe()
    box = None
    server = None
    try:
        try:
            box = sandbox.start(
                make_request(argv, plan, (changes.pop("stdin", null), write, write), **changes)
            )
        finally:
            os.close(write)
            os.close(null)
        assert box.listener_fd is not None
        server = threading.Thread(target=let_through, args=(box.listener_fd,))
        server.start()
        box.release()
        yield box, read
    finally:
        os.close(read)
        if box is not None:
            box.kill()
            if server is not None:
                server.join(10)
            box.close()


def run(argv: list[str], plan: Plan, **changes: Any) -> dict[str, Any]:
    """Run to the end: `{"out": text, "status": int}`."""
    with started(argv, plan, **changes) as (box, read):
        out = b""
        while part := os.read(read, 65536):
            out += part
        until = time.monotonic() + 20
        while box.poll() is None:
            assert time.monotonic() < until, "the command does not end"
            time.sleep(0.001)
        return {"out": out.decode("utf-8", "backslashreplace"), "status": box.poll()}


def main() -> None:
    spec = json.load(sys.stdin)
    inputs = tuple(grant(path) for path in spec["inputs"])
    with tempfile.TemporaryDirectory() as workdir:
        json.dump(run(spec["argv"], make_plan(spec.get("workdir") or workdir, inputs)), sys.stdout)


if __name__ == "__main__":
    main()

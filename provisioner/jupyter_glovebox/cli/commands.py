"""`exec` and `shell`: any command in the same sandbox as a notebook's kernel."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import sys
import termios
import threading
import tty
import uuid
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CannotIsolateError, ExecExit, GloveboxError, UsageError
from ..ledger.events import Event
from ..ledger.store import Ledger
from ..locations import private_dir, runtime_dir, state_dir
from ..manifest.compile import Resolution, resolve
from ..sandbox.base import Environment
from ..sandbox.environment import discover, kernel_environment
from ..supervisor.process import SupervisorProcess
from ..supervisor.spec import Command, LaunchSpec
from ..supervisor.sweep import sweep_dead
from . import show

_CAPTURE_LIMIT = 16 << 20


def register(subparsers: Any) -> None:
    """Add the commands of this module."""
    parser = subparsers.add_parser(
        "exec",
        usage="%(prog)s [-h] [--manifest FILE] [--export DIR] [--json] -- CMD ...",
        help="run a command in a sandbox",
        description="Run any command in the sandbox. Paths in the manifest are relative to the current folder. "
        "Without a manifest the command gets scratch and nothing else.",
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="what the command may touch")
    parser.add_argument("--export", type=Path, metavar="DIR", help="where verified outputs go")
    parser.add_argument("--json", action="store_true", help="capture the command's output into a JSON result")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command")
    parser.set_defaults(run=_exec, error_code=_exec_code)
    parser = subparsers.add_parser(
        "shell",
        help="a shell in a notebook's sandbox",
        description="Open a shell in the sandbox that the notebook's kernel gets: the same files, the same limits.",
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help="use this manifest (you approve it by this)"
    )
    parser.set_defaults(run=_shell)


def _exec_code(error: GloveboxError) -> int:
    if isinstance(error, CannotIsolateError):
        return int(ExecExit.CANNOT_ISOLATE)
    if isinstance(error, UsageError):
        return int(ExecExit.USAGE)
    return int(ExecExit.DENIED)


class _Capture:
    """Copies one of the command's streams to ours, or keeps it."""

    def __init__(self, target: int | None) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self._target = target
        self._kept: list[bytes] = []
        self._size = 0
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while data := os.read(self.read_fd, 1 << 16):
            if self._target is None:
                if self._size < _CAPTURE_LIMIT:
                    self._kept.append(data)
                    self._size += len(data)
                continue
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._target, view) :]
            except OSError:
                self._target = None  # our reader went away; the command must not block on it
                self._size = _CAPTURE_LIMIT

    def text(self) -> str:
        """Everything kept, once the command has ended."""
        self._thread.join(5.0)
        os.close(self.read_fd)
        return b"".join(self._kept).decode("utf-8", "replace")

    def started(self) -> None:
        """The command has its copy of the writing end."""
        os.close(self.write_fd)


def _feed_stdin() -> int:
    """A pipe that carries our standard input: the terminal itself never enters the sandbox."""
    read_fd, write_fd = os.pipe()

    def copy() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 16):
                os.write(write_fd, data)
        os.close(write_fd)

    threading.Thread(target=copy, daemon=True).start()
    return read_fd


def _spec(
    resolution: Resolution,
    argv: list[str],
    environment: Environment,
    stdio: tuple[int, int, int],
    *,
    export: Path | None = None,
    terminal: bool = False,
) -> LaunchSpec:
    plan = resolution.plan
    return LaunchSpec(
        kernel_id=str(uuid.uuid4()),
        mode="command",
        plan=plan,
        environment=environment,
        argv=tuple(argv),
        env=kernel_environment(plan, environment, host_env=dict(os.environ), spec_env={}),
        manager_pid=os.getpid(),
        runtime_dir=str(private_dir(runtime_dir() / os.urandom(6).hex())),
        ledger=str(state_dir() / "ledger.sqlite3"),
        stdio=stdio,
        terminal=terminal,
        export_dir=None if export is None else str(export.absolute()),
    )


def _launch(spec: LaunchSpec) -> SupervisorProcess:
    """Start it and wait until the command runs; raises what a failed start means."""
    sweep_dead()
    process = SupervisorProcess.start(spec)
    process.wait(lambda: process.started, 60.0)
    if process.launched is None:
        process.wait(lambda: process.closed is not None, 10.0)
        process.reap()
        process.raise_failure()
    return process


def _exec(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise UsageError("No command was given.", "Write it after two dashes: jupyter glovebox exec -- CMD …")
    resolution = resolve(None, manifest_file=args.manifest, workdir=Path.cwd(), caller_approves=True)
    try:
        environment = discover(argv, dict(os.environ))
    except FileNotFoundError:
        show.note(f"jupyter glovebox exec: {argv[0]}: command not found")
        return 127
    except PermissionError:
        show.note(f"jupyter glovebox exec: {argv[0]}: cannot be executed")
        return 126
    out, err = _Capture(None if args.json else 1), _Capture(None if args.json else 2)
    stdin = _feed_stdin()
    spec = _spec(resolution, argv, environment, (stdin, out.write_fd, err.write_fd), export=args.export)
    try:
        process = _launch(spec)
    except (FileNotFoundError, PermissionError) as error:
        show.note(f"jupyter glovebox exec: {argv[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        out.started()
        err.started()
        os.close(stdin)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _: process.send(Command(do="signal", signum=number)))
    process.wait(lambda: process.closed is not None)
    code, budget = _exit_code(process)
    texts = out.text(), err.text()
    if args.json:
        show.as_json(_exec_result(spec, resolution, process, code) | {"stdout": texts[0], "stderr": texts[1]})
    else:
        if budget:
            show.note(f"jupyter glovebox exec: {budget}")
        _tell(process, spec.kernel_id)
    process.reap()
    return code


def _exit_code(process: SupervisorProcess) -> tuple[int, str]:
    ended = process.ended
    if ended is None:
        return int(ExecExit.CANNOT_ISOLATE), "the supervisor was killed"
    if ended.budget:
        return int(ExecExit.DENIED), ended.message
    return (128 - ended.status if ended.status < 0 else ended.status), ""


def _events(kernel_id: str) -> list[Event]:
    ledger = Ledger(str(state_dir() / "ledger.sqlite3"))
    try:
        return ledger.events(kernel_id=kernel_id, limit=10_000)[0]
    finally:
        ledger.close()


def _tell(process: SupervisorProcess, kernel_id: str) -> None:
    """What was blocked, and what became of the files it wrote for export."""
    files = process.closed.artifacts if process.closed else []
    # Files that stayed behind are among the files, with every reason.
    blocked = [e for e in _events(kernel_id) if not (e.event_class == "left-behind" and files)]
    if blocked:
        show.note("\nBlocked accesses and other events:\n" + show.events(blocked))
    if files:
        show.note("\nFiles:\n" + show.artifacts(files))


def _exec_result(
    spec: LaunchSpec, resolution: Resolution, process: SupervisorProcess, code: int
) -> dict[str, Any]:
    closed, ended, launched = process.closed, process.ended, process.launched
    status = "budget" if ended and ended.budget else "completed" if code == 0 else "error"
    return {
        "notebook": None,
        "status": status,
        "reason": ended.message if ended and ended.budget else "",
        "exit_code": code,
        "plan": spec.plan.digest,
        "isolation": spec.plan.isolation,
        "posture": msgspec.to_builtins(launched.posture) if launched else {},
        "blocked": [msgspec.to_builtins(event) for event in _events(spec.kernel_id)],
        "artifacts": closed.artifacts if closed else [],
        "usage": msgspec.to_builtins(closed.record.usage) if closed else None,
        "cleanup": msgspec.to_builtins(closed.record.cleanup) if closed else {},
        "kernel_id": spec.kernel_id,
        "notice": resolution.notice,
    }


# -- shell --------------------------------------------------------------------------------------


def _shell(args: argparse.Namespace) -> int:
    from .runner import read_notebook

    notebook = read_notebook(args.notebook)
    resolution = resolve(
        args.notebook, manifest_file=args.manifest, caller_approves=args.manifest is not None
    )
    if resolution.notice:
        show.note(resolution.notice)
    if not os.isatty(0):
        raise UsageError(
            "`shell` needs a terminal.",
            "For a command without one: jupyter glovebox exec --manifest FILE -- CMD",
        )
    environment = discover(_kernel_argv(notebook), dict(os.environ))
    master, slave = pty.openpty()
    _copy_window_size(master)
    bash = shutil.which("bash", path="/usr/bin:/bin") or "/bin/sh"
    spec = _spec(resolution, [bash, "-i"], environment, (slave, slave, slave), terminal=True)
    spec.env["HISTFILE"] = ""  # no history: its usual place is a sensitive one
    process = _launch(spec)
    os.close(slave)
    show.note("In the sandbox. Leave with `exit`.")
    old = termios.tcgetattr(0)
    signal.signal(signal.SIGWINCH, lambda *_: _copy_window_size(master))
    try:
        tty.setraw(0, termios.TCSANOW)  # not TCSAFLUSH: what was typed ahead stays
        _copy_terminal(process, master)
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, old)
    process.wait(lambda: process.closed is not None)
    code, budget = _exit_code(process)
    if budget:
        show.note(budget)
    _tell(process, spec.kernel_id)
    process.reap()
    return code


def _kernel_argv(notebook: Any) -> list[str]:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    name = notebook.metadata.get("kernelspec", {}).get("name", "python3")
    try:
        argv: list[str] = KernelSpecManager().get_kernel_spec(name).argv
    except NoSuchKernel:
        return [sys.executable]
    return [sys.executable if argv[0] in ("python", "python3") else argv[0], *argv[1:]]


def _copy_window_size(master: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))


def _copy_terminal(process: SupervisorProcess, master: int) -> None:
    """Carry bytes between our terminal and the sandbox's until the shell has ended."""
    sources = [0, master, process.fileno()]
    while True:
        ready = select.select(sources, [], [])[0]
        if process.fileno() in ready:
            process.pump()
        if master in ready:
            try:
                data = os.read(master, 1 << 16)
            except OSError:
                return  # the last user of the other side has gone
            if not data:
                return
            os.write(1, data)
        if 0 in ready:
            data = os.read(0, 1 << 12)
            if not data:
                return
            os.write(master, data)
        if process.ended is not None or process.gone:
            return

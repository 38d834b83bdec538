"""The kernel provisioner `glovebox`: turns a kernel start into a plan and a supervisor.

It is thin on purpose: it resolves the grant, finds the language environment, and talks to the
supervisor. What a kernel may do is enforced by the supervisor and the operating system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from .errors import CannotIsolateError, GloveboxError
from .grants import Grant, grant_for
from .locations import private_dir, runtime_dir, state_dir
from .sandbox.base import INNER_CONNECTION_FILE
from .sandbox.environment import discover, kernel_environment
from .supervisor.process import SupervisorProcess
from .supervisor.spec import Command, LaunchSpec, Notice, Ports
from .supervisor.sweep import sweep_dead

_START_SECONDS = 60.0
_CLEANUP_SECONDS = 120.0


class GloveboxProvisioner(KernelProvisionerBase):
    """Starts every kernel in a sandbox. One supervisor per life of the kernel; the grant is kept."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The base class holds one dict for all provisioners.
        self.connection_info: KernelConnectionInfo = {}
        self._grant: Grant | None = None
        self._process: SupervisorProcess | None = None
        self._folder: Path | None = None
        self._status: int | None = None
        self._cwd = ""
        self._host_env: dict[str, str] = {}

    # -- start ----------------------------------------------------------------------------------

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Resolve the grant, choose private endpoints, build the command.

        Raises:
            GloveboxError: manifest, policy, approval or this machine do not allow the start.
        """
        if sys.platform != "linux":
            raise CannotIsolateError(
                f"Glovebox isolates kernels on Linux only, and this is {sys.platform}.",
                "Run Jupyter on a Linux machine, in a virtual machine, or in WSL 2.",
            )
        encryption = kwargs.pop("transport_encryption", getattr(self.parent, "transport_encryption", None))
        if encryption == "required":
            raise GloveboxError(
                "transport_encryption='required' cannot be met: kernel messages use private Unix sockets.",
                "Set transport_encryption to 'auto' or 'disabled'; no other user can open these sockets.",
            )
        extra = kwargs.pop("extra_arguments", [])
        self._cwd = os.path.abspath(kwargs.get("cwd") or os.getcwd())
        self._folder = self._folder or runtime_dir() / secrets.token_hex(6)
        command = self._prepare_manager(extra, kwargs)
        kwargs = await super().pre_launch(cmd=command, **kwargs)
        if self._grant is None:
            self._grant = grant_for(self.kernel_id, cwd=self._cwd, env=kwargs["env"])
            if notice := self._grant.resolution.notice:
                self.log.warning(notice)
        return kwargs

    def _prepare_manager(self, extra: list[str], kwargs: dict[str, Any]) -> list[str]:
        """Point the manager to our endpoints; the kernel's command, with the name of its connection file."""
        manager = self.parent
        if manager is None:
            self.connection_info = {
                "transport": "ipc",
                "ip": f"{self._folder}/o",
                "key": secrets.token_hex(16),
                "signature_scheme": "hmac-sha256",
                "shell_port": 1,
                "iopub_port": 2,
                "stdin_port": 3,
                "control_port": 4,
                "hb_port": 5,
            }
            return [
                p.replace("{connection_file}", INNER_CONNECTION_FILE)
                for p in (*self.kernel_spec.argv, *extra)
            ]
        manager.transport = "ipc"
        manager.ip = f"{self._folder}/o"
        session = (kwargs.get("env") or {}).get("JPY_SESSION_NAME", "")
        try:
            manager.write_connection_file(jupyter_session=session)
        except TypeError:  # jupyter_client < 8.7 knows no session name
            manager.write_connection_file()
        self.connection_info = manager.get_connection_info()
        names = {manager.connection_file, os.path.realpath(manager.connection_file)}
        command: list[str] = manager.format_kernel_cmd(extra_arguments=extra)
        for name in sorted(names, key=len, reverse=True):
            command = [part.replace(name, INNER_CONNECTION_FILE) for part in command]
        return command

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start a supervisor and wait until the kernel's program runs inside.

        Raises:
            FileNotFoundError, PermissionError: argv[0] does not exist or cannot be executed.
            SandboxError: the sandbox cannot be built here.
            RefusedError: a rule refuses the launch.
        """
        grant, folder = self._grant, self._folder
        if grant is None or folder is None:
            raise GloveboxError("launch_kernel was called before pre_launch.")
        await self._end_former_life()
        self._status = None
        private_dir(folder)
        try:
            spec = self._launch_spec(cmd, kwargs.get("env"), grant, folder)
            stderr = kwargs.get("stderr")
            process = SupervisorProcess.start(spec, stderr=_descriptor(stderr))
        except BaseException:
            folder.rmdir()
            raise
        self._process = process
        process.on_notice = self._tell
        if not await process.wait_async(lambda: process.started, _START_SECONDS) or process.launched is None:
            await process.wait_async(lambda: process.closed is not None, 10.0)
            self._forget()
            process.raise_failure()
        grant.results = {"launched": process.launched}
        return self.connection_info

    def _launch_spec(
        self, cmd: list[str], client_env: dict[str, str] | None, grant: Grant, folder: Path
    ) -> LaunchSpec:
        plan = grant.resolution.plan
        host_env = dict(os.environ if client_env is None else client_env)
        spec_env = {name: host_env[name] for name in self.kernel_spec.env if name in host_env}
        environment = discover(cmd, host_env, cwd=self._cwd)
        info = self.connection_info
        key = info.get("key", b"")
        return LaunchSpec(
            kernel_id=self.kernel_id,
            plan=plan,
            environment=environment,
            argv=tuple(cmd),
            env=kernel_environment(plan, environment, host_env=host_env, spec_env=spec_env),
            outer=Ports(
                prefix=str(info["ip"]),
                shell=info["shell_port"],
                iopub=info["iopub_port"],
                stdin=info["stdin_port"],
                control=info["control_port"],
                hb=info["hb_port"],
                key=key.decode() if isinstance(key, bytes) else key,
            ),
            manager_pid=os.getpid(),
            runtime_dir=str(folder),
            ledger=str(state_dir() / "ledger.sqlite3"),
            export_dir=grant.export_dir,
            promote=grant.promote,
        )

    async def _end_former_life(self) -> None:
        """A manager may start a kernel again without ending the former one: both would share endpoints."""
        if self._process is not None:
            self._process.send(Command(do="destroy", reason="restart"))
            await self._finish(self._process)
        sweep_dead()

    def _tell(self, notice: Notice) -> None:
        event = notice.event
        level = logging.WARNING if event.severity != "info" else logging.INFO
        self.log.log(level, "glovebox: %s: %s %s", event.event_class, event.operation, event.target)

    # -- while it runs --------------------------------------------------------------------------

    @property
    def has_process(self) -> bool:
        """True until `wait` has seen the end."""
        return self._process is not None

    async def poll(self) -> int | None:
        """None while the kernel runs, else its exit status."""
        process = self._process
        if process is None:
            return 0 if self._status is None else self._status
        process.pump()
        if process.ended is not None:
            return process.ended.status
        return -signal.SIGKILL if process.gone else None

    async def wait(self) -> int | None:
        """Wait for the kernel's end; destruction may still go on (`cleanup` waits for it)."""
        process = self._process
        if process is None:
            return self._status
        await process.wait_async(lambda: process.ended is not None)
        self._status = process.ended.status if process.ended else -signal.SIGKILL
        await self._finish(process)
        return self._status

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group: the cell and its children, nothing else."""
        if self._process is None:
            return
        if signum == signal.SIGKILL:
            await self.kill()
        elif signum != 0:
            self._process.send(Command(do="signal", signum=signum))

    async def kill(self, restart: bool = False) -> None:
        """SIGKILL everything inside. Whether a restart follows is not told here (jupyter_client#1061)."""
        if self._process is not None:
            reason = "restart" if self._restarting or restart else "kill"
            self._process.send(Command(do="destroy", reason=reason))

    async def terminate(self, restart: bool = False) -> None:
        """SIGTERM to the kernel's process group."""
        await self.send_signal(signal.SIGTERM)

    _restarting = False

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Remember whether this end is a restart: only this call and `cleanup` are told."""
        self._restarting = restart
        if self._process is not None:
            self._process.send(Command(do="expect", reason="restart" if restart else "shutdown"))

    async def cleanup(self, restart: bool = False) -> None:
        """Wait until the sandbox is destroyed and recorded. Idempotent; harmless before a launch."""
        process = self._process
        if process is not None:
            process.pump()
            if process.ended is None:
                process.send(Command(do="destroy", reason="restart" if restart else "shutdown"))
            await self._finish(process)
        self._restarting = False

    async def _finish(self, process: SupervisorProcess) -> None:
        """See the supervisor to its end; clean up after it when it was killed."""
        if not await process.wait_async(lambda: process.closed is not None, _CLEANUP_SECONDS):
            if not process.gone:
                self.log.error("glovebox: the supervisor did not finish in time and is killed")
                process.kill()
                await process.wait_async(lambda: False, 5.0)
            await asyncio.to_thread(self._sweep)
        if self._grant is not None:
            self._grant.results |= {"ended": process.ended, "closed": process.closed}
        self._forget()

    def _sweep(self) -> None:
        for record in sweep_dead(only=self.kernel_id):
            self.log.warning("glovebox: cleaned up after a supervisor that was killed: %s", record.kernel_id)

    def _forget(self) -> None:
        if self._process is not None:
            self._process.reap()
            self._process = None
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def resolve_path(self, path: str) -> str | None:
        """None: the server must not answer for the sandbox from the host's file system."""
        return None


def _descriptor(stream: Any) -> int | None:
    """The descriptor behind a Popen-like `stderr` argument; special values (PIPE, DEVNULL) mean our own."""
    if isinstance(stream, int):
        return stream if stream >= 0 else None
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None

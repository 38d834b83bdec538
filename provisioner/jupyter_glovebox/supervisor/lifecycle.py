"""The life of one kernel, from limits to the usage record. Runs in the supervisor's main thread.

Order of the start: limits, sandbox (its command waits), self-check of the posture, observation, relay,
release. Order of the end: kill, see it empty, verify and promote outputs, remove, record. Every exit
goes through `_finish`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from .. import limits, sandbox
from ..errors import CannotIsolateError, GloveboxError, RefusedError
from ..ledger.events import Cell, CleanupStep, Usage, UsageRecord, escape
from ..limits.base import Breach, ControlState, Limiter, LimitValues
from ..locations import config_dir, runtime_dir, state_dir
from ..sandbox import posture
from ..sandbox.base import INNER_CONNECTION_FILE, KERNEL_SOCKET_DIR, Request, Sandbox, SandboxError
from ..sandbox.inside import open_inside
from ..sandbox.validation import validate
from . import checks, destruction
from .channel import CONTROL_FD, Channel, Lines, read_available
from .exports import Exporter, outputs_dir
from .folders import DiskScratch
from .output import KernelOutput
from .recorder import Recorder
from .spec import Closed, Command, Ended, Failed, Launched, LaunchSpec
from .state import KernelState, process_start, write_state

if TYPE_CHECKING:
    from .observation import Observer
    from .relay import Relay

_TICK_MS = 100
_STATE_SECONDS = 2.0


class Supervisor:
    """Owns one sandbox. `run` returns when nothing of it is left."""

    def __init__(self, spec: LaunchSpec, channel: Channel, rest: bytes) -> None:
        self.spec = spec
        self.plan = spec.plan
        self.channel = channel
        self.recorder = Recorder(spec, channel)
        self.lines = Lines()
        self._early = self.lines.feed(rest)
        self.started = time.time()
        self._clock = time.monotonic()
        self.startup: dict[str, float] = {}
        self.limiter: Limiter | None = None
        self.sandbox: Sandbox | None = None
        self.relay: Relay | None = None
        self.observer: Observer | None = None
        self.exporter: Exporter | None = None
        self.output = KernelOutput() if spec.mode == "kernel" else None
        self.posture: dict[str, ControlState] = {}
        self.disk_scratch: str | None = None
        self._disk: DiskScratch | None = None
        self._fds: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        self._fds += [self._wake_read, self._wake_write]
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.end_reason: str | None = None
        self.breach: Breach | None = None
        self._inputs = checks.InputWatch(self.plan)
        self._expected = "exit"
        self._next_state = 0.0

    # -- the whole ------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, serve until the end, destroy."""
        try:
            self._start()
        except FileNotFoundError as error:
            self._fail("not-found", "exec", str(error.filename or error))
        except PermissionError as error:
            self._fail("permission", "exec", str(error.filename or error))
        except SandboxError as error:
            self._fail("cannot-isolate", error.stage, error.message, error.remedy)
        except CannotIsolateError as error:
            self._fail("cannot-isolate", "posture", error.message, error.remedy)
        except RefusedError as error:
            self._fail("refused", "rule", error.message, error.remedy)
        except GloveboxError as error:
            self._fail("error", "supervisor", error.message, error.remedy)
        except Exception as error:  # noqa: BLE001 - nothing may be left behind, whatever it was
            self._trace()
            self._fail("error", "supervisor", f"The supervisor failed: {error!r}")
        else:
            try:
                status = self._serve()
            except Exception as error:  # noqa: BLE001 - destroyed and recorded, whatever it was
                self._trace()
                self.recorder.report(
                    "cleanup", "supervise", escape(f"The supervisor failed: {error!r}"), severity="high"
                )
                self.end_reason, status = "supervisor-failed", -signal.SIGKILL
            self._finish(status)

    def _fail(self, kind: str, stage: str, message: str, remedy: str = "") -> None:
        self.end_reason = "failed-launch"
        self._finish(None)
        self.channel.send(Failed(kind=kind, stage=stage, message=message, remedy=remedy))

    @staticmethod
    def _trace() -> None:
        import traceback  # costs milliseconds, and is hardly ever needed

        traceback.print_exc()

    def _mark(self, step: str) -> None:
        now = time.monotonic()
        self.startup[step] = round(now - self._clock, 4)
        self._clock = now

    # -- start ----------------------------------------------------------------------------------

    def _start(self) -> None:
        plan = self.plan
        checks.refuse_unbuilt(plan)
        validate(
            plan,
            self.spec.environment,
            private_dirs=(str(state_dir()), str(config_dir()), str(runtime_dir())),
        )
        self._mark("validate")
        self._write_state()
        self.limiter = limits.choose(self._limit_values(), self.spec.kernel_id)
        if os.getuid() == 0 and (reason := limits.refuse_reason(self.limiter)):
            raise SandboxError("limits", reason, "Run: jupyter glovebox doctor")
        self._mark("limits")
        request = self._request()
        self.sandbox = box = sandbox.start(request)
        self.startup.update({f"sandbox.{k}": round(v, 4) for k, v in box.startup.items()})
        self._mark("sandbox")
        if hasattr(self.limiter, "adopt"):
            self.limiter.adopt(box.init_pid)
        self._take_outputs(box)
        self.posture = posture.measure(box, request)
        self._start_observer(box)
        if self.spec.mode == "kernel":
            self._start_relay(box)
        self._complete_posture()
        checks.demand(self.posture, plan)
        self._mark("self-check")
        self._write_state()
        box.release()
        if self.output is not None:
            self.output.started()
        self._mark("exec")
        self.channel.send(
            Launched(pid=box.pid, isolation=plan.isolation, posture=self.posture, startup=self.startup)
        )

    def _limit_values(self) -> LimitValues:
        budgets, outputs = self.plan.budgets, self.plan.outputs
        tmpfs = self.plan.scratch.size if self.plan.scratch.on == "memory" else 0
        tmpfs += outputs.max_total_size if outputs and outputs.path != "." else 0
        return LimitValues(
            memory=budgets.memory + tmpfs,
            memory_budget=budgets.memory,
            cpus=budgets.cpus,
            cpu_time=budgets.cpu_time,
            wall_time=budgets.wall_time,
            processes=budgets.processes,
            open_files=budgets.open_files,
        )

    def _request(self) -> Request:
        plan, spec = self.plan, self.spec
        assert self.limiter is not None  # noqa: S101 - narrows the type
        if self.output is not None:
            null = os.open("/dev/null", os.O_RDONLY)
            self._fds.append(null)
            stdio = (null, self.output.write_fd, self.output.write_fd)
        elif spec.stdio is not None:
            stdio = spec.stdio
        else:
            raise GloveboxError("A command needs its three streams.")
        if plan.scratch.on == "disk":
            self.disk_scratch = checks.make_disk_scratch(spec.kernel_id)
            self._disk = DiskScratch(self.disk_scratch, plan.scratch.size)
        return Request(
            plan=plan,
            environment=spec.environment,
            argv=spec.argv,
            env=spec.env,
            files=self._connection_file(),
            stdin=stdio[0],
            stdout=stdio[1],
            stderr=stdio[2],
            enter=self.limiter.enter,
            tmp_size=plan.budgets.memory // 4,
            shm_size=plan.budgets.memory // 2,
            home_size=plan.budgets.memory // 8,
            outputs_size=plan.outputs.max_total_size if plan.outputs else 0,
            disk_scratch=self.disk_scratch,
            terminal=spec.terminal,
            meanwhile=self._import_rest,
        )

    def _import_rest(self) -> None:
        """Load what is needed in a moment, while the sandbox's own processes start on another core."""
        from . import observation  # noqa: F401

        if self.spec.mode == "kernel":
            from . import relay  # noqa: F401

    def _connection_file(self) -> dict[str, bytes]:
        if self.spec.mode != "kernel":
            return {}
        import json
        import secrets

        self.inner_key = secrets.token_hex(32)
        content = {
            "shell_port": 1, "iopub_port": 2, "stdin_port": 3, "control_port": 4, "hb_port": 5,
            "ip": f"{KERNEL_SOCKET_DIR}/k", "key": self.inner_key, "transport": "ipc",
            "signature_scheme": "hmac-sha256", "kernel_name": "",
        }  # fmt: skip
        return {INNER_CONNECTION_FILE: json.dumps(content, indent=2).encode()}

    def _take_outputs(self, box: Sandbox) -> None:
        folder = outputs_dir(self.plan)
        if folder is None:
            return
        fd = open_inside(box.root_fd, folder, os.O_RDONLY | os.O_DIRECTORY)
        self._fds.append(fd)
        self.exporter = Exporter(
            self.plan, fd, self.spec.export_dir, self.spec.runtime_dir, self.spec.kernel_id
        )

    def _start_observer(self, box: Sandbox) -> None:
        if box.listener_fd is None:
            return
        from .observation import Observer

        self.observer = Observer(
            box.listener_fd,
            root_fd=box.root_fd,
            mounts=box.mounts,
            plan=self.plan,
            kernel_id=self.spec.kernel_id,
            current_cell=lambda: self.recorder.current_cell(),
            sink=self.recorder.add,
            homes=(os.path.expanduser("~"),),
        )
        self.observer.start()

    def _start_relay(self, box: Sandbox) -> None:
        from .relay import Relay

        if self.spec.outer is None:
            raise GloveboxError("A kernel needs the manager's endpoints.")
        sockets_fd = open_inside(box.root_fd, KERNEL_SOCKET_DIR, os.O_RDONLY | os.O_DIRECTORY)
        self._fds.append(sockets_fd)
        self.relay = relay = Relay(
            self.spec.outer, self.inner_key, on_cell=self._on_cell, on_problem=self._on_problem
        )
        self.recorder.current_cell = lambda: relay.cells.current
        self.recorder.complete_cell = relay.cells.complete
        relay.bind()
        relay.start(sockets_fd)

    def _complete_posture(self) -> None:
        assert self.limiter is not None  # noqa: S101 - narrows the type
        self.posture |= self.limiter.states()
        self.posture |= checks.fixed_controls(self.plan, relay=self.relay is not None)
        self.posture["observation"] = (
            self.observer.state()
            if self.observer
            else ControlState("off", "this isolation has no observation")
        )

    # -- serve ----------------------------------------------------------------------------------

    def _on_cell(self, cell: Cell | None) -> None:
        if cell is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"c")

    def _on_problem(self, kind: str, detail: str) -> None:
        self.recorder.report("message", kind, detail, rule="relay", severity="high")

    def _serve(self) -> int:
        """Watch everything until the command has ended or must end; its exit status."""
        box = self.sandbox
        assert box is not None  # noqa: S101 - narrows the type
        poller = select.poll()
        manager = self._pidfd(self.spec.manager_pid)
        kernel = self._pidfd(box.pid)
        for fd in (CONTROL_FD, self._wake_read, manager, kernel):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        if self.output is not None:
            poller.register(self.output.read_fd, select.POLLIN)
        if manager < 0:
            self.end_reason = "manager-gone"
        for line in self._early:
            self._command(line)
        while self.end_reason is None:
            ready = {fd for fd, _ in poller.poll(_TICK_MS)}
            if CONTROL_FD in ready:
                self._read_commands()
            if manager in ready:
                self.end_reason = "manager-gone"
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._inputs.report_changes(self.recorder)
            if self.output is not None and self.output.read_fd in ready and not self.output.pump():
                poller.unregister(self.output.read_fd)
            if self.channel.pending:
                self.channel.flush(0)
            self._check_budgets()
            status = box.poll() if kernel in ready or kernel < 0 else None
            if status is not None:
                self._last_words()
                self.end_reason = self.end_reason or self._expected
                return status
        return -signal.SIGKILL

    def _pidfd(self, pid: int) -> int:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return -1
        self._fds.append(fd)
        return fd

    def _read_commands(self) -> None:
        data, ended = read_available(CONTROL_FD)
        for line in self.lines.feed(data):
            self._command(line)
        if ended and self.end_reason is None:
            self.end_reason = "manager-gone"

    def _command(self, line: bytes) -> None:
        import msgspec

        command = msgspec.json.decode(line, type=Command)
        if command.do == "destroy":
            self.end_reason = self.end_reason or command.reason
        elif command.do == "expect":
            self._expected = command.reason
        elif command.do == "promote" and self.exporter is not None:
            self.exporter.export(self.recorder, promoting=True)
        elif command.do == "signal" and self.sandbox is not None:
            self.sandbox.signal(command.signum)

    def _check_budgets(self) -> None:
        assert self.limiter is not None  # noqa: S101 - narrows the type
        breach = self.limiter.check()
        if breach is None and self._disk is not None:
            breach = self._disk.check(self.limiter.pids())
        if breach is not None:
            self.recorder.report("limit", breach.budget, breach.message, rule=f"budgets.{breach.budget}")
            if breach.fatal:
                self._end_by(breach)
        now = time.monotonic()
        if now >= self._next_state:
            self._next_state = now + _STATE_SECONDS
            with contextlib.suppress(OSError):
                self._write_state()

    def _end_by(self, breach: Breach) -> None:
        self.breach = breach
        self.end_reason = f"budget:{breach.budget}"
        if self.relay is not None:
            self.relay.announce_end(breach.budget, breach.message)

    def _last_words(self) -> None:
        """The command ended: was it a budget, and what did it print?"""
        assert self.limiter is not None  # noqa: S101 - narrows the type
        if self.output is not None:
            self.output.pump()
        breach = self.limiter.check()
        if breach is not None and breach.fatal:
            self.recorder.report("limit", breach.budget, breach.message, rule=f"budgets.{breach.budget}")
            self._end_by(breach)

    # -- end ------------------------------------------------------------------------------------

    def _finish(self, status: int | None) -> None:
        """Kill, export, remove, record. Never raises."""
        peak = self._usage()
        steps: dict[str, CleanupStep] = {}
        steps["processes"] = destruction.end_processes(self.sandbox, self.limiter)
        if status is not None:
            self.channel.send(
                Ended(
                    status=status,
                    budget=self.breach.budget if self.breach else None,
                    message=self.breach.message if self.breach else (self.output.tail if self.output else ""),
                )
            )
            self.channel.flush(0.2)
        if self.observer is not None:
            self.observer.stop()
        artifacts: list[dict[str, object]] = []
        if status is not None and self.exporter is not None:
            try:
                artifacts = self.exporter.export(self.recorder, promoting=self.spec.promote)
            except Exception as error:  # noqa: BLE001 - the sandbox must still be destroyed
                self._trace()
                self.recorder.report(
                    "left-behind", "export", "outputs", rule=f"the export failed: {error!r}", severity="high"
                )
        steps["sockets"] = destruction.stop_relay(self.relay, self.spec.outer)
        steps["cgroup"] = destruction.remove_limits(self.limiter)
        steps["credentials"] = CleanupStep(verified=True, detail="no credential was granted")
        if self.sandbox is not None:
            self.sandbox.close()
        if self.output is not None:
            self.output.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        steps["storage"] = destruction.remove_folders(self.spec.runtime_dir, self.disk_scratch)
        for name, step in steps.items():
            if not step.verified:
                self.recorder.report("cleanup", name, step.detail, rule="destruction", severity="high")
        record = UsageRecord(
            kernel_id=self.spec.kernel_id,
            notebook=self.plan.notebook,
            plan=self.plan.digest,
            started=self.started,
            ended=time.time(),
            closed_by=self.end_reason or "exit",
            usage=peak,
            cleanup=steps,
            isolation=self.plan.isolation,
            exit_status=status,
        )
        self.recorder.add_usage(record)
        self.recorder.close()
        self.channel.send(Closed(record=record, artifacts=artifacts))

    def _usage(self) -> Usage:
        reading = self.limiter.reading() if self.limiter is not None else None
        return Usage(
            cpu_seconds=reading.cpu_seconds if reading else None,
            peak_memory_bytes=reading.memory_peak if reading else None,
            wall_seconds=round(time.time() - self.started, 3),
            startup_seconds=round(sum(v for k, v in self.startup.items() if "." not in k), 4) or None,
            processes_peak=reading.tasks_peak if reading else None,
            display_bytes=self.relay.display_bytes if self.relay is not None else None,
        )

    def _write_state(self) -> None:
        import getpass

        write_state(
            KernelState(
                kernel_id=self.spec.kernel_id,
                notebook=self.plan.notebook,
                user=getpass.getuser(),
                isolation=self.plan.isolation,
                plan=self.plan.digest,
                ledger=self.spec.ledger,
                started=self.started,
                supervisor_pid=os.getpid(),
                supervisor_start=process_start(os.getpid()) or 0,
                limiter=self.spec.kernel_id,
                posture=self.posture,
                usage=self._usage(),
                blocked=self.recorder.blocked,
            ),
            self.spec.runtime_dir,
        )

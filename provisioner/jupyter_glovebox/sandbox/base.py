"""The small interface behind which each isolation stands, and the shapes it takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from ..errors import CannotIsolateError
from ..manifest.plan import Plan

INNER_DIR = "/run/glovebox"
"""The folder inside that holds what the sandbox itself puts there (stage, connection file; read-only)."""
KERNEL_SOCKET_DIR = "/run/kernel"
"""The sandbox tmpfs folder inside that holds the kernel's sockets; the only one we connect to."""
INNER_CONNECTION_FILE = f"{INNER_DIR}/connection.json"


class SandboxError(CannotIsolateError):
    """The sandbox could not be built; nothing of it is left.

    Attributes:
        stage: `bwrap-missing`, `bwrap-setuid`, `user-namespace`, `mount`, `proc`, `network`, `seccomp`,
            `landlock`, `validation`, `stage`, `exec`, `limits`, `unknown`.
    """

    def __init__(self, stage: str, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.stage = stage


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A host file or folder bound read-only at `target`. `source` is a real path, free of links."""

    source: str
    target: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The language environment of a kernel, found on the host and mounted read-only.

    Attributes:
        binds: folders and files, parents before children.
        links: symbolic links made inside, as (target text, link name).
        path: folders for PATH; each lies in a bind.
        variables: what the environment itself needs (VIRTUAL_ENV, CONDA_PREFIX, …).
        notes: what a person should know (an editable install outside, …), for `explain`.
        unmounted: host paths that the environment names but that need an approval first.
    """

    binds: tuple[Bind, ...]
    links: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    unmounted: tuple[str, ...] = ()


class Mounted(msgspec.Struct, frozen=True, kw_only=True):
    """One mount of a running sandbox, in mount order. `source` is the host path of a bind, else None."""

    target: str
    writable: bool
    source: str | None = None


class Request(msgspec.Struct, kw_only=True):
    """Everything one sandbox is made from.

    Attributes:
        plan: what it may do.
        environment: the language environment.
        argv: the command; argv[0] absolute inside or found on `environment.path`.
        env: the complete environment of the command.
        files: read-only files put inside, absolute name to content (`connection.json`).
        stdin, stdout, stderr: descriptors for the command.
        enter: called in the forked child before bwrap is executed (joins the limits); may raise OSError.
        tmp_size, shm_size, home_size: bytes of the tmpfs at /tmp, /dev/shm, HOME.
        outputs_size: bytes of the outputs tmpfs.
        disk_scratch: host folder for `scratch: {on: disk}`, made by the caller, else None.
        terminal: stdin is a terminal that becomes the controlling one (`shell`).
        meanwhile: called once while the sandbox's first processes come up; work that would cost time later.
    """

    plan: Plan
    environment: Environment
    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, bytes]
    stdin: int
    stdout: int
    stderr: int
    enter: Callable[[], None]
    tmp_size: int
    shm_size: int
    home_size: int
    outputs_size: int
    disk_scratch: str | None = None
    terminal: bool = False
    meanwhile: Callable[[], None] | None = None


class Sandbox(Protocol):
    """A sandbox whose command waits for `release`."""

    pid: int
    """The command's pid as the host sees it."""
    init_pid: int
    """Pid 1 of the sandbox's pid namespace, as the host sees it."""
    root_fd: int
    """O_PATH descriptor of the sandbox's root; names below it must be opened without links."""
    listener_fd: int | None
    """The seccomp notify listener, None when this isolation has none."""
    landlock_abi: int
    """The Landlock ABI in force, 0 for none."""
    mounts: tuple[Mounted, ...]
    """Every mount inside, for classifying accesses and for the table of writable places."""
    startup: dict[str, float]
    """Seconds per step of the start, by step name."""

    def release(self) -> None:
        """Let the command start.

        Raises:
            FileNotFoundError: argv[0] does not exist inside (as subprocess.Popen would raise).
            PermissionError: argv[0] cannot be executed.
            SandboxError: the stage ended for another reason.
        """
        ...

    def poll(self) -> int | None:
        """None while the command runs, else its exit status (negative: signal), as Popen.poll."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal to the command's process group, nothing else."""
        ...

    def kill(self) -> None:
        """SIGKILL everything inside."""
        ...

    def close(self) -> None:
        """Close every descriptor held; idempotent."""
        ...

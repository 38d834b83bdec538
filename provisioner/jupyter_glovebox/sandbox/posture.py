"""The posture of one sandbox, measured while its command waits: what the kernel says, not what we asked for.

Sources: proc(5) (status, mountinfo, uid_map, fdinfo), namespaces(7), ioctl_ns(2).
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable

from ..ledger.events import escape
from ..limits.base import ControlState
from . import landlock
from .base import Request, Sandbox

_NAMESPACES = {
    "user": "user", "pid": "pid", "mount": "mnt", "network": "net", "ipc": "ipc", "uts": "uts",
    "cgroup_namespace": "cgroup",
}  # fmt: skip
_NS_GET_PARENT = 0xB702
_CLOEXEC_FLAG = 0o2000000
_DOCTOR = "Run: jupyter glovebox doctor"
# What bubblewrap and the interpreter of the stage set for themselves; the command's own is given at exec.
_STAGE_VARIABLES = {b"PWD", b"OLDPWD", b"LC_CTYPE"}


def measure(sandbox: Sandbox, request: Request) -> dict[str, ControlState]:
    """The state of every control that the sandbox itself holds.

    Args:
        sandbox: a started sandbox whose command was not released yet.
        request: what it was made from.

    Returns:
        user, uid, capabilities, pid, mount, network, ipc, uts, cgroup_namespace, seccomp, landlock,
        no_new_privileges, environment, descriptors, storage. What cannot be measured is `off`.
    """
    states: dict[str, ControlState] = {}
    for control, name in _NAMESPACES.items():
        states[control] = _try(lambda name=name: _namespace(sandbox, name))  # type: ignore[misc]
    checks: dict[str, Callable[[], ControlState]] = {
        "uid": lambda: _uid(_status(sandbox.pid)),
        "capabilities": lambda: _capabilities(_status(sandbox.pid)),
        "seccomp": lambda: _seccomp(sandbox, _status(sandbox.pid)),
        "landlock": lambda: _landlock(sandbox),
        "no_new_privileges": lambda: _no_new_privileges(_status(sandbox.pid)),
        "environment": lambda: _environment(sandbox),
        "descriptors": lambda: _descriptors(sandbox),
        "storage": lambda: _storage(sandbox, _mountinfo(sandbox.pid)),
    }
    for control, check in checks.items():
        states[control] = _try(check)
    if states["user"].state == "enforced":
        states["user"] = _try(lambda: _nested_user(sandbox))
    if states["mount"].state == "enforced":
        states["mount"] = _try(lambda: _mounts(sandbox, _mountinfo(sandbox.pid)))
    return states


def _try(check: Callable[[], ControlState]) -> ControlState:
    try:
        return check()
    except (OSError, ValueError, KeyError, IndexError) as error:
        return ControlState("off", f"It could not be measured: {escape(str(error))}", _DOCTOR)


def _namespace(sandbox: Sandbox, name: str) -> ControlState:
    ours = os.stat(f"/proc/self/ns/{name}")
    theirs = os.stat(f"/proc/{sandbox.pid}/ns/{name}")
    if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        return ControlState("off", f"The {name} namespace is the host's.", _DOCTOR)
    return ControlState("enforced", f"Its own {name} namespace ({theirs.st_ino}).")


def _nested_user(sandbox: Sandbox) -> ControlState:
    """`--disable-userns` puts the command a level deeper than one user namespace would."""
    fd = os.open(f"/proc/{sandbox.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        parent = fcntl.ioctl(fd, _NS_GET_PARENT)
        try:
            if os.fstat(parent).st_ino == os.stat("/proc/self/ns/user").st_ino:
                return ControlState("soft", "Programs inside may make user namespaces.", _DOCTOR)
        finally:
            os.close(parent)
    finally:
        os.close(fd)
    return ControlState("enforced", "Its own user namespace, in which no further one can be made.")


def _status(pid: int) -> dict[str, list[str]]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="surrogateescape") as file:
        return {key: value.split() for key, _, value in (line.partition(":") for line in file)}


def _uid(status: dict[str, list[str]]) -> ControlState:
    uids = set(status["Uid"] + status["Gid"])
    if "0" in uids:
        return ControlState(
            "soft",
            "Started by root: inside it is an ordinary user without capabilities, outside it is root.",
            "Run Jupyter as an ordinary user.",
        )
    return ControlState("enforced", f"Runs as uid {status['Uid'][0]}.")


def _capabilities(status: dict[str, list[str]]) -> ControlState:
    left = [n for n in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[n][0], 16)]
    if left:
        return ControlState("off", f"Capabilities are left in {', '.join(left)}.", _DOCTOR)
    return ControlState("enforced", "No capability in any set, the bounding set included.")


def _seccomp(sandbox: Sandbox, status: dict[str, list[str]]) -> ControlState:
    expected = 2 if sandbox.listener_fd is not None else 1
    # Seccomp_filters exists from Linux 5.9 on.
    filters = int(status.get("Seccomp_filters", [str(expected)])[0])
    if status["Seccomp"] != ["2"] or filters < expected:
        return ControlState("off", f"{filters} of {expected} filters are in force.", _DOCTOR)
    return ControlState("enforced", f"{filters} system call filters are in force.")


def _landlock(sandbox: Sandbox) -> ControlState:
    abi = sandbox.landlock_abi
    fix = "Use Linux 6.12 or newer, with landlock in the kernel's list of security modules."
    if not abi:
        return ControlState("off", "The kernel has no Landlock, or one that is too old.", fix)
    if abi < landlock.WHOLE_ABI:
        return ControlState("soft", f"ABI {abi}: files only, not signals and abstract sockets.", fix)
    return ControlState("enforced", f"ABI {abi}, tried out inside: a forbidden write was refused.")


def _no_new_privileges(status: dict[str, list[str]]) -> ControlState:
    if status["NoNewPrivs"] != ["1"]:
        return ControlState("off", "A setuid program could gain privileges.", _DOCTOR)
    return ControlState("enforced", "No program can gain privileges.")


def _environment(sandbox: Sandbox) -> ControlState:
    for pid in (sandbox.init_pid, sandbox.pid):
        with open(f"/proc/{pid}/environ", "rb") as file:
            names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0") if entry}
        if extra := names - _STAGE_VARIABLES:
            return ControlState("off", f"Variables of the host are inside: {escape(sorted(extra)[0])}.")
    return ControlState("enforced", "No variable of the host is inside.")


def _descriptors(sandbox: Sandbox) -> ControlState:
    for name in os.listdir(f"/proc/{sandbox.pid}/fd"):
        if int(name) < 3:
            continue
        try:
            with open(f"/proc/{sandbox.pid}/fdinfo/{name}") as file:
                flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
        except FileNotFoundError:
            continue  # the stage has closed it since: it closes everything on its way
        if not flags & _CLOEXEC_FLAG:
            return ControlState("off", f"Descriptor {name} would be inherited.", _DOCTOR)
    for name in os.listdir(f"/proc/{sandbox.init_pid}/fd"):
        try:
            kind = os.stat(f"/proc/{sandbox.init_pid}/fd/{name}").st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(kind) or stat.S_ISREG(kind) or stat.S_ISBLK(kind) or stat.S_ISCHR(kind):
            return ControlState("off", f"Process 1 inside holds a file of the host ({name}).", _DOCTOR)
    return ControlState("enforced", "Only its three streams are inherited.")


def _mountinfo(pid: int) -> dict[str, tuple[set[str], str, str]]:
    """Mount point to (mount options, file system, its options); the topmost of each name counts."""
    found: dict[str, tuple[set[str], str, str]] = {}
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            fields, rest = before.split(" "), after.split(" ")
            point = fields[4]
            for code in ("\\040", "\\011", "\\012", "\\134"):
                point = point.replace(code, chr(int(code[1:], 8)))
            found[point] = (set(fields[5].split(",")), rest[0], rest[2])
    return found


def _mounts(sandbox: Sandbox, mounts: dict[str, tuple[set[str], str, str]]) -> ControlState:
    allowed = {m.target for m in sandbox.mounts if m.writable} | {"/proc", "/dev/pts"}
    writable = {point for point, (options, _, _) in mounts.items() if "ro" not in options}
    devices = {point for point in writable if mounts[point][1] == "devtmpfs" or _is_device(point)}
    if extra := sorted(writable - allowed - devices):
        return ControlState("off", f"{escape(extra[0])} is writable and should not be.", _DOCTOR)
    if "ro" not in mounts["/"][0] or "ro" not in mounts["/dev"][0]:
        return ControlState("off", "The root or /dev is writable.", _DOCTOR)
    if devices and os.getuid() == 0:
        return ControlState(
            "soft",
            "Root's device nodes could be given another mode from inside.",
            "Run Jupyter as an ordinary user, or give its container the right to mount.",
        )
    return ControlState("enforced", "Read-only but for the listed writable places; nothing of the host else.")


def _is_device(point: str) -> bool:
    return point.startswith("/dev/") and point not in ("/dev/pts", "/dev/shm")  # noqa: S108


def _storage(sandbox: Sandbox, mounts: dict[str, tuple[set[str], str, str]]) -> ControlState:
    unsized = []
    for mount in sandbox.mounts:
        if not mount.writable:
            continue
        _, kind, options = mounts[mount.target]
        if kind != "tmpfs" or "size=" not in options or mount.source is not None:
            unsized.append(mount.target)
    if unsized:
        return ControlState(
            "soft",
            f"{escape(unsized[0])} is a folder of the host; its size is watched, not held.",
            "Use `scratch: {on: memory}`.",
        )
    return ControlState("enforced", "Every writable place is a tmpfs of limited size.")

"""cgroup v2: finding a subtree that is ours to use, and one group in it for one kernel.

Who may use which group: below systemd every unit belongs to systemd, but for those it delegates
(`Delegate=`; it marks them with the attribute `user.delegate` or `trusted.delegate`). A group with
processes cannot give controllers to its children, so the processes of the delegated group are moved to a
leaf `glovebox-host` first. Sources: cgroups(7), kernel Documentation/admin-guide/cgroup-v2.rst,
systemd.resource-control(5), systemd's "Control Group APIs and Delegation".
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from .base import LimitValues, Reading
from .files import read_int, read_keyed, read_pids, read_text, remove_group, write
from .groups import kill_pids
from .host import Host, Unavailable, below, writable

WANTED = ("memory", "pids", "cpu", "cpuset")
HOST_LEAF = "glovebox-host"
LEAF_PREFIX = "glovebox-"
NO_CONTROLLERS = "cgroup v2 does not hold this machine's controllers"
_PERIOD = 100_000
_DELEGATE = "Delegate=cpu cpuset io memory pids"


class V2Groups:
    """One cgroup v2 group."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def paths(self) -> list[Path]:
        return [self.path]

    def procs(self) -> list[int]:
        return read_pids(self.path / "cgroup.procs")

    def empty(self) -> bool:
        # A group that has gone has no events; a group that cannot be read is not seen to be empty.
        events = read_keyed(self.path / "cgroup.events")
        return events["populated"] == 0 if "populated" in events else not self.path.exists()

    def kill(self) -> None:
        try:
            write(self.path / "cgroup.kill", "1")
        except FileNotFoundError:
            if self.path.exists():
                self._kill_frozen()

    def _kill_frozen(self) -> None:
        """Before Linux 5.14. A frozen group cannot fork; SIGKILL ends frozen processes of v2."""
        write(self.path / "cgroup.freeze", "1")
        try:
            deadline = time.monotonic() + 0.5
            while not read_keyed(self.path / "cgroup.events").get("frozen") and time.monotonic() < deadline:
                time.sleep(0.001)
            kill_pids(self.procs())
        finally:
            write(self.path / "cgroup.freeze", "0")

    def removed(self) -> None:
        """Nothing was shared but groups that systemd removes."""

    def read(self) -> Reading:
        memory_events = read_keyed(self.path / "memory.events")
        cpu = read_keyed(self.path / "cpu.stat").get("usage_usec")
        return Reading(
            memory=read_int(self.path / "memory.current"),
            memory_peak=read_int(self.path / "memory.peak"),
            cpu_seconds=None if cpu is None else cpu / 1e6,
            tasks=read_int(self.path / "pids.current"),
            tasks_peak=read_int(self.path / "pids.peak"),
            oom_kills=memory_events.get("oom_kill", 0),
            pids_refused=read_keyed(self.path / "pids.events").get("max", 0),
            memory_limit_hits=memory_events.get("oom"),
        )


def delegated_group(host: Host) -> Path:
    """The group below which we may make our own, judged without changing anything.

    Raises:
        Unavailable: there is none.
    """
    mount = host.v2_mount()
    if mount is None:
        raise Unavailable("cgroup v2 is not mounted")
    if not available_controllers(mount) & {"memory", "pids"}:
        raise Unavailable(NO_CONTROLLERS)
    own = below(mount, path := host.own_groups().get("", "/.."))
    if own is None:
        raise Unavailable("our own group is not visible in /sys/fs/cgroup", _container_fix(host))
    unit = _nearest_unit(mount, own)
    if unit is not None:
        if not _delegated(unit, host):
            raise Unavailable(f"systemd has not delegated our group {path}", service_fix(host))
        group = unit
    elif host.systemd and host.uid == 0:
        raise Unavailable("our group belongs to systemd", service_fix(host))
    else:
        group = own.parent if own.name == HOST_LEAF else own
    if not writable(group, group / "cgroup.procs", group / "cgroup.subtree_control"):
        raise Unavailable(
            f"our cgroup v2 group {path} cannot be written",
            service_fix(host) if host.systemd else _container_fix(host),
        )
    return group


def available_controllers(group: Path) -> frozenset[str]:
    """The controllers wanted here that `group` can give to its children."""
    return frozenset((read_text(group / "cgroup.controllers") or "").split()).intersection(WANTED)


def _nearest_unit(mount: Path, own: Path) -> Path | None:
    for path in (own, *own.parents):
        if path == mount:
            return None
        if path.name.endswith((".service", ".scope")):
            return path
    return None


def _delegated(unit: Path, host: Host) -> bool:
    for attribute in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(unit, attribute) == b"1"
    # systemd before 251 marks only with an attribute that root alone may read, but gives a unit's group
    # to the unit's user only when it is delegated. A user's own manager owns all its units' groups.
    managed = any(part.startswith("user@") for part in unit.parts)
    return host.uid != 0 and not managed and unit.stat().st_uid == host.uid


def service_fix(host: Host) -> str:
    """What makes systemd delegate a group to this process."""
    if host.uid == 0:
        return f"In the unit that starts Jupyter, set under [Service]: {_DELEGATE}; then restart it."
    return (
        f"If a systemd service starts Jupyter, set under its [Service]: {_DELEGATE}; then restart it. "
        f"Otherwise run: sudo loginctl enable-linger {host.uid}"
    )


def controllers_fix() -> str:
    """What makes a user's manager pass all controllers on."""
    return (
        "sudo mkdir -p /etc/systemd/system/user@.service.d && "
        f"printf '[Service]\\n{_DELEGATE}\\n' | "
        "sudo tee /etc/systemd/system/user@.service.d/delegate.conf && "
        "sudo systemctl daemon-reload; then log out of every session and in again."
    )


def _container_fix(host: Host) -> str:
    return (
        f"Give this container or job a writable cgroup v2 of its own at {host.root} "
        "(podman: --systemd=always), or run Jupyter as a service of the host with " + _DELEGATE
    )


def enable_controllers(group: Path, wanted: frozenset[str]) -> frozenset[str]:
    """Let the children of `group` have controllers; its processes move to a leaf where that is needed.

    Returns:
        Those of `wanted` that are on.

    Raises:
        OSError: processes could not be moved.
    """
    control = group / "cgroup.subtree_control"
    missing = wanted - set((read_text(control) or "").split())
    # Only the root of the whole hierarchy has no type, and may have processes beside children.
    if missing and (group / "cgroup.type").exists():
        _move_processes(group)
    for controller in sorted(missing):
        for attempt in range(5):
            try:
                write(control, f"+{controller}")
                break
            except OSError as error:
                if error.errno != errno.EBUSY or attempt == 4:
                    break
                _move_processes(group)  # something was forked into the group meanwhile
    return wanted & set((read_text(control) or "").split())


def _move_processes(group: Path) -> None:
    leaf = group / HOST_LEAF
    for _ in range(20):
        pids = read_pids(group / "cgroup.procs")
        if not pids:
            return
        leaf.mkdir(exist_ok=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                write(leaf / "cgroup.procs", str(pid))


def create(
    group: Path, name: str, values: LimitValues, cpus: frozenset[int]
) -> tuple[V2Groups, frozenset[str], bool]:
    """Make the kernel's group with its limits; a failure leaves nothing.

    Returns:
        The group, the controllers that hold something, and whether swap is held.

    Raises:
        Unavailable: memory and processes cannot be held here.
        OSError: a limit could not be set, or a living kernel has that name.
    """
    wanted = available_controllers(group)
    if not wanted & {"memory", "pids"}:
        raise Unavailable("the controllers memory and pids are not passed on to our group", controllers_fix())
    held = set(enable_controllers(group, wanted))
    leaf = group / f"{LEAF_PREFIX}{name}"
    _make_fresh(leaf)
    try:
        swap = False
        if "memory" in held:
            write(leaf / "memory.max", str(values.memory))
            write(leaf / "memory.oom.group", "1")
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                write(leaf / "memory.swap.max", "0")
                swap = True
        if "pids" in held:
            write(leaf / "pids.max", str(values.processes))
        if "cpu" in held:
            quota = max(1000, round(values.cpus * _PERIOD))
            write(leaf / "cpu.max", f"{quota} {_PERIOD}")
        if "cpuset" in held:
            try:
                write(leaf / "cpuset.cpus", ",".join(map(str, sorted(cpus))))
            except OSError:
                held.discard("cpuset")  # processors of another partition; affinity remains
    except BaseException:
        remove_group(leaf)
        raise
    return V2Groups(leaf), frozenset(held), swap


def _make_fresh(leaf: Path) -> None:
    """A new group: one left over has old counters. Raises FileExistsError when it has processes."""
    try:
        leaf.mkdir()
    except FileExistsError:
        if not V2Groups(leaf).empty():
            raise
        remove_group(leaf)
        leaf.mkdir()


def find_leftovers(host: Host, name: str) -> list[V2Groups]:
    """Groups of ours of that name, wherever their supervisor stood."""
    mount = host.v2_mount()
    found: list[V2Groups] = []
    for folder, names, _ in os.walk(mount) if mount else ():
        if f"{LEAF_PREFIX}{name}" in names:
            path = Path(folder, f"{LEAF_PREFIX}{name}")
            with contextlib.suppress(OSError):
                if path.stat().st_uid == host.uid:
                    found.append(V2Groups(path))
    return found

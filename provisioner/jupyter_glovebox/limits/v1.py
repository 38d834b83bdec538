"""cgroup v1: one group per controller, below a folder `glovebox` of our own group or of the hierarchy's root.

An unprivileged user can use folders that an administrator made (`glovebox-<uid>`, owned by the user).
Sources: cgroups(7), kernel Documentation/admin-guide/cgroup-v1/.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from .base import LimitValues, Reading
from .files import read_int, read_keyed, read_pids, read_text, remove_group, write
from .groups import kill_pids
from .host import Host, Unavailable, below, writable

CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "cpuset", "freezer")
FOLDER = "glovebox"
_PERIOD = 100_000


class V1Groups:
    """One group per controller. Joint controllers (cpu,cpuacct) share a folder.

    Args:
        by_controller: folder of each controller that could be used.
    """

    def __init__(self, by_controller: dict[str, Path]) -> None:
        self._by = by_controller

    def paths(self) -> list[Path]:
        return list(dict.fromkeys(path.resolve() for path in self._by.values()))

    def procs(self) -> list[int]:
        return sorted({pid for path in self.paths() for pid in read_pids(path / "cgroup.procs")})

    def empty(self) -> bool:
        for path in self.paths():
            # An unreadable group is not seen to be empty; one that has gone is.
            if (text := read_text(path / "cgroup.procs")) is None:
                if path.exists():
                    return False
            elif text.strip():
                return False
        return True

    def kill(self) -> None:
        """No fork can win: pids.max is 0 and the group is frozen while its members get SIGKILL."""
        if pids := self._by.get("pids"):
            with contextlib.suppress(FileNotFoundError):
                write(pids / "pids.max", "0")
        frozen = self._freeze()
        try:
            killed: set[int] = set()
            while new := set(self.procs()) - killed:
                kill_pids(sorted(new))
                killed |= new
        finally:
            # A frozen process of v1 does not die: it first has to be thawed.
            if frozen:
                write(self._by["freezer"] / "freezer.state", "THAWED")

    def _freeze(self) -> bool:
        folder = self._by.get("freezer")
        if folder is None or not folder.exists():
            return False
        write(folder / "freezer.state", "FROZEN")
        deadline = time.monotonic() + 0.1
        # A process in an uninterruptible wait keeps it FREEZING; it cannot fork there either.
        while (read_text(folder / "freezer.state") or "").strip() != "FROZEN" and time.monotonic() < deadline:
            time.sleep(0.001)
        return True

    def removed(self) -> None:
        _remove_folders(path.parent for path in self._by.values())

    def _file(self, controller: str, name: str) -> Path:
        folder = self._by.get(controller)
        return folder / name if folder else Path("/nonexistent")

    def read(self) -> Reading:
        nanoseconds = read_int(self._file("cpuacct", "cpuacct.usage"))
        return Reading(
            memory=read_int(self._file("memory", "memory.usage_in_bytes")),
            memory_peak=read_int(self._file("memory", "memory.max_usage_in_bytes")),
            cpu_seconds=None if nanoseconds is None else nanoseconds / 1e9,
            tasks=read_int(self._file("pids", "pids.current")),
            tasks_peak=read_int(self._file("pids", "pids.peak")),
            oom_kills=read_keyed(self._file("memory", "memory.oom_control")).get("oom_kill", 0),
            pids_refused=read_keyed(self._file("pids", "pids.events")).get("max", 0),
        )


def usable_bases(host: Host) -> dict[str, Path]:
    """For each controller the folder below which a kernel's group can be made; changes nothing."""
    own_groups = host.own_groups()
    found: dict[str, Path] = {}
    for controller in CONTROLLERS:
        mount = host.root / controller
        if not (mount / "cgroup.procs").exists():
            continue
        own = below(mount, own_groups.get(controller, "/.."))
        for parent in dict.fromkeys(filter(None, (own, mount))):
            base = parent / FOLDER
            if writable(base) if base.is_dir() else writable(parent):
                found[controller] = base
                break
        else:
            given = mount / f"{FOLDER}-{host.uid}"
            if given.is_dir() and given.stat().st_uid == host.uid and writable(given):
                found[controller] = given
    return found


def fix(host: Host) -> str:
    """What gives an unprivileged user groups of their own. Without cpuset: it needs more, and adds little."""
    return (
        f"sudo sh -c 'for c in memory pids cpu cpuacct freezer; do d={host.root}/$c/{FOLDER}-{host.uid}; "
        f"mkdir -p $d && chown {host.uid} $d; done'   (again after each boot; or boot with cgroup v2: "
        "systemd.unified_cgroup_hierarchy=1)"
    )


def create(
    host: Host, name: str, values: LimitValues, cpus: frozenset[int]
) -> tuple[V1Groups, frozenset[str], bool]:
    """Make the kernel's groups with their limits; a failure leaves nothing.

    Returns:
        The groups, the controllers that hold something, and whether swap is held.

    Raises:
        Unavailable: neither memory nor processes can be held here.
        OSError: a limit could not be set, or a living kernel has that name.
    """
    bases = usable_bases(host)
    if not bases.keys() & {"memory", "pids"}:
        mounted = any((host.root / c / "cgroup.procs").exists() for c in CONTROLLERS)
        reason = "no cgroup v1 group can be written" if mounted else "cgroup v1 is not mounted"
        raise Unavailable(reason, fix(host) if mounted else "")
    made: dict[str, Path] = {}
    try:
        for controller, base in bases.items():
            _make_fresh(controller, base, base / name, made)
        swap = _set_limits(made, values, cpus)
    except BaseException:
        for path in V1Groups(made).paths():
            remove_group(path)
        _remove_folders(bases.values())
        raise
    return V1Groups(made), frozenset(made), swap


def _make_fresh(controller: str, base: Path, leaf: Path, made: dict[str, Path]) -> None:
    """A new group, its folder too. One left over has old counters: it is removed when it is empty."""
    joint = leaf.resolve() in {path.resolve() for path in made.values()}
    for _ in range(20):
        with contextlib.suppress(FileExistsError):
            base.mkdir()
        if controller == "cpuset":
            _fill_cpuset(base)
        try:
            if not joint:
                leaf.mkdir()
            break
        except FileExistsError:
            if read_pids(leaf / "cgroup.procs"):
                raise
            remove_group(leaf)
        except FileNotFoundError:
            continue  # the end of another kernel has just removed the empty folder
    else:
        raise FileNotFoundError(2, "the folder vanishes again and again", str(base))
    made[controller] = leaf
    if controller == "cpuset":
        _fill_cpuset(leaf)


def _fill_cpuset(folder: Path) -> None:
    """A new cpuset is empty, and then nothing may enter it."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if not (read_text(folder / name) or "").strip():
            write(folder / name, (read_text(folder.parent / name) or "").strip())


def _set_limits(made: dict[str, Path], values: LimitValues, cpus: frozenset[int]) -> bool:
    swap = False
    if memory := made.get("memory"):
        write(memory / "memory.limit_in_bytes", str(values.memory))
        try:
            # After the limit: memory and swap together may never be below it.
            write(memory / "memory.memsw.limit_in_bytes", str(values.memory))
            swap = True
        except FileNotFoundError:  # a kernel without swap accounting
            with contextlib.suppress(OSError):
                write(memory / "memory.swappiness", "0")
    if pids := made.get("pids"):
        write(pids / "pids.max", str(values.processes))
    if cpu := made.get("cpu"):
        write(cpu / "cpu.cfs_period_us", str(_PERIOD))
        write(cpu / "cpu.cfs_quota_us", str(max(1000, round(values.cpus * _PERIOD))))
    if cpuset := made.get("cpuset"):
        write(cpuset / "cpuset.cpus", ",".join(map(str, sorted(cpus))))
    return swap


def _remove_folders(folders: Iterable[Path]) -> None:
    """Remove shared folders that are ours and empty; one with the groups of other kernels stays."""
    for folder in folders:
        if folder.name == FOLDER:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def find_leftovers(host: Host, name: str) -> V1Groups:
    """Groups of ours of that name, wherever their supervisor stood."""
    found: dict[str, Path] = {}
    for controller in CONTROLLERS:
        mount = host.root / controller
        if not (mount / "cgroup.procs").exists():
            continue
        for folder, names, _ in os.walk(mount):
            if name in names and Path(folder).name in (FOLDER, f"{FOLDER}-{host.uid}"):
                with contextlib.suppress(OSError):
                    if Path(folder, name).stat().st_uid == host.uid:
                        found[f"{controller}:{folder}" if controller in found else controller] = Path(
                            folder, name
                        )
    return V1Groups(found)

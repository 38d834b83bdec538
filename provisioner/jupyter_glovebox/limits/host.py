"""Where this process stands on this machine: cgroup mounts, its own groups, who it is."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .files import read_text


class Unavailable(Exception):
    """A way to hold limits that does not exist here: why, and what would make it exist."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class Host(NamedTuple):
    """The machine as a limiter sees it.

    Attributes:
        root: where the cgroup file systems are mounted.
        proc: procfs.
        run: /run; `run/systemd/system` exists where systemd runs the machine (sd_booted(3)).
        uid: our effective user id.
    """

    root: Path
    proc: Path
    run: Path
    uid: int

    @property
    def systemd(self) -> bool:
        """Whether systemd runs this machine, so that groups outside delegated units are its alone."""
        return (self.run / "systemd/system").is_dir()

    def own_groups(self) -> dict[str, str]:
        """Our place by controller name; key "" for cgroup v2. Source: cgroups(7), /proc/[pid]/cgroup."""
        found: dict[str, str] = {}
        for line in (read_text(self.proc / "self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                found[controller] = path
        return found

    def v2_mount(self) -> Path | None:
        """Where cgroup v2 is mounted: the root itself, `unified` beside v1 hierarchies, or nowhere."""
        for mount in (self.root, self.root / "unified"):
            if (mount / "cgroup.controllers").is_file():
                return mount
        return None


def below(mount: Path, path: str) -> Path | None:
    """The group `path` under `mount`; None when it lies outside our cgroup namespace or does not exist."""
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:
        return None
    group = mount.joinpath(*parts)
    return group if group.is_dir() else None


def writable(*paths: Path) -> bool:
    """Whether all of these exist and may be written by us (access(2); false on a read-only mount)."""
    return all(os.access(path, os.W_OK, effective_ids=True) for path in paths)


def swap_is_on(proc: Path) -> bool:
    """Whether the machine has active swap (proc(5), /proc/swaps: a header and a line for each area)."""
    return len((read_text(proc / "swaps") or "").splitlines()) > 1

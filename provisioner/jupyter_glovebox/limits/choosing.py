"""Choosing the best limiter this machine has, and removing what a dead supervisor left of one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..ledger.events import CleanupStep
from . import systemd, v1, v2
from .base import Limiter, LimitValues
from .cgroup import CgroupLimiter
from .entry import choose_cpus
from .groups import Groups, destroy_groups
from .host import Host, Unavailable
from .rlimit import RlimitLimiter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NEEDED_BY_ROOT = ("memory", "cpus", "cpu_time", "processes")


class _Made(NamedTuple):
    groups: Groups
    controllers: frozenset[str]
    swap_held: bool
    fix: str


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a control group.",
            "Use up to 100 letters, digits, dots, dashes and underscores, a letter or digit first.",
        )
    return name


def _check_values(values: LimitValues) -> None:
    for field in ("memory", "memory_budget", "cpus", "cpu_time", "wall_time", "processes", "open_files"):
        if not 0 < getattr(values, field) < float("inf"):
            raise UsageError(
                f"The budget {field} must be greater than nothing.", "Correct it in the manifest."
            )


def choose(
    values: LimitValues,
    name: str,
    *,
    root: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
    run: Path = Path("/run"),
) -> Limiter:
    """Make the limits of one kernel, by the best means here; must be called by the kernel's supervisor.

    In order: a delegated cgroup v2 subtree, a systemd scope (which this process enters), cgroup v1, and
    polling. Means that hold both memory and processes come before means that hold one of them. With
    cgroup v2 the processes of our own delegated group, this one too, may move to a leaf beside the kernel's.

    Args:
        values: the limits.
        name: names the groups; unique on this machine while the kernel lives.
        root: where the cgroup file systems are mounted.
        proc: procfs.
        run: the folder /run.

    Raises:
        UsageError: a name that no group can have, or a limit that is nothing.
    """
    _checked(name)
    _check_values(values)
    host = Host(root, proc, run, os.geteuid())
    cpus = choose_cpus(values.cpus, name)
    reasons: list[str] = []
    fix = ""
    for needed in (2, 1):
        for kind, make in _MEANS:
            try:
                limiter = _build(kind, make, host, name, values, cpus, needed)
            except (Unavailable, OSError) as error:
                if needed == 2:
                    reasons.append(_reason(kind, error))
                    fix = (error.fix if isinstance(error, Unavailable) else "") or fix
                continue
            return limiter
    return RlimitLimiter(values, cpus, host, reasons=tuple(dict.fromkeys(reasons)), fix=fix)


def _reason(kind: str, error: Unavailable | OSError) -> str:
    if isinstance(error, Unavailable):
        return error.reason
    return f"{kind}: {error.filename or 'the group'}: {error.strerror}"


def _build(
    kind: str,
    make: Callable[[Host, str, LimitValues, frozenset[int], int], _Made],
    host: Host,
    name: str,
    values: LimitValues,
    cpus: frozenset[int],
    needed: int,
) -> Limiter:
    made = make(host, name, values, cpus, needed)
    try:
        if len(made.controllers & {"memory", "pids"}) < needed:
            raise Unavailable(f"{kind} does not have both memory and pids here", made.fix)
        return CgroupLimiter(
            kind,
            made.groups,
            made.controllers,
            swap_held=made.swap_held,
            fix=made.fix,
            host=host,
            values=values,
            cpus=cpus,
        )
    except BaseException:
        destroy_groups(made.groups, 1.0)
        raise


def _delegated(host: Host, name: str, values: LimitValues, cpus: frozenset[int], needed: int) -> _Made:
    group = v2.delegated_group(host)
    if len(v2.available_controllers(group) & {"memory", "pids"}) < needed:
        raise Unavailable(
            "our cgroup v2 group does not have the controllers memory and pids", v2.service_fix(host)
        )
    return _Made(*v2.create(group, name, values, cpus), v2.service_fix(host))


def _scope(host: Host, name: str, values: LimitValues, cpus: frozenset[int], needed: int) -> _Made:
    group = systemd.own_scope(host, name)
    if len(v2.available_controllers(group) & {"memory", "pids"}) < needed:
        raise Unavailable("the user's systemd does not pass on memory and pids", v2.controllers_fix())
    return _Made(*v2.create(group, name, values, cpus), v2.controllers_fix())


def _version_1(host: Host, name: str, values: LimitValues, cpus: frozenset[int], needed: int) -> _Made:
    return _Made(*v1.create(host, name, values, cpus), v1.fix(host))


_MEANS = (
    ("cgroup-v2-delegated", _delegated),
    ("cgroup-v2-systemd", _scope),
    ("cgroup-v1", _version_1),
)


def refuse_reason(limiter: Limiter) -> str | None:
    """Why a kernel started by root must not start with these limits, None when it may.

    Root's processes are under no other limit of the machine, so each must be `enforced`.
    """
    states = limiter.states()
    missing = [name for name in _NEEDED_BY_ROOT if states[name].state != "enforced"]
    if not missing:
        return None
    first = states[missing[0]]
    return f"Started by root, and not enforced here: {', '.join(missing)} ({first.reason})." + (
        f" {first.fix}" if first.fix else ""
    )


def sweep(
    name: str,
    *,
    root: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
    run: Path = Path("/run"),
    timeout: float = 5.0,
) -> CleanupStep:
    """Destroy the groups that a dead supervisor left under `name`, wherever it stood. Never raises but for `name`.

    Polled limits leave nothing: the sandbox has ended with its supervisor.

    Raises:
        UsageError: a name that no group can have.
    """
    host = Host(root, proc, run, os.geteuid())
    found: list[Groups] = [*v2.find_leftovers(host, _checked(name)), v1.find_leftovers(host, name)]
    steps = [destroy_groups(groups, timeout) for groups in found if groups.paths()]
    if not steps:
        return CleanupStep(verified=True, detail="no control group of that name is left")
    return CleanupStep(
        verified=all(step.verified for step in steps), detail="; ".join(step.detail for step in steps)
    )

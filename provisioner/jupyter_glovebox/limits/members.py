"""Measuring processes through /proc, where no control group does it. Sources: proc(5), pid_namespaces(7)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .files import read_text

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Measured(NamedTuple):
    """Sums over processes: resident bytes (shared pages counted in each), processor seconds, tasks."""

    resident: int
    cpu_seconds: float
    tasks: int


def namespace_of(pid: int, proc: Path) -> int | None:
    """Inode of a process's pid namespace, None when it has gone or may not be looked at."""
    try:
        return os.stat(proc / str(pid) / "ns/pid").st_ino
    except OSError:
        return None


def namespace_members(inode: int, proc: Path) -> list[int]:
    """Every process in that pid namespace; looks at all processes of the machine."""
    return [
        pid
        for entry in os.listdir(proc)
        if entry.isdigit() and namespace_of(pid := int(entry), proc) == inode
    ]


def descendants(pid: int, proc: Path) -> list[int] | None:
    """`pid` and all below it, None where the kernel lists no children (CONFIG_PROC_CHILDREN).

    For pid 1 of a namespace these are all members: orphans become its children.
    """
    found, queue, listed = [], [pid], False
    while queue:
        found.append(current := queue.pop())
        folder = proc / str(current) / "task"
        try:
            threads = os.listdir(folder)
        except OSError:
            continue
        for thread in threads:
            text = read_text(folder / thread / "children")
            if text is not None:
                listed = True
                queue.extend(int(child) for child in text.split())
    return found if listed or not (proc / str(pid)).exists() else None


def measure(pids: Iterable[int], proc: Path) -> Measured:
    """Sum up living processes and, by their parents' accounts, the children they have waited for."""
    resident = ticks = tasks = 0
    for pid in pids:
        text = read_text(proc / str(pid) / "stat")
        if text is None:
            continue
        # The command name may hold spaces and brackets: fields count from the last bracket (field 3).
        fields = text.rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
        tasks += int(fields[17])
        resident += int(fields[21]) * _PAGE
    return Measured(resident, ticks / _TICKS, tasks)


def proportional_memory(pids: Iterable[int], proc: Path) -> int | None:
    """Bytes with each shared page divided among its users (PSS); None when one may not be looked at."""
    total = 0
    for pid in pids:
        folder = proc / str(pid)
        text = read_text(folder / "smaps_rollup")
        if text is None:
            if folder.exists():
                return None
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
                break
    return total

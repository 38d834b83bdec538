"""Reading and writing the small text files of cgroupfs and procfs."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path) -> str | None:
    """The content, None when it cannot be read (missing controller, group gone, no right)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts).decode("ascii", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)


def read_int(path: Path) -> int | None:
    """A file of one number; None when it is missing, unreadable or no number (`max`)."""
    text = read_text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def read_keyed(path: Path) -> dict[str, int]:
    """A file of `key number` lines (memory.events, cpu.stat); empty when it cannot be read."""
    found: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[key] = int(value)
    return found


def write(path: Path, text: str) -> None:
    """Write in one call, as cgroupfs demands; never creates the file. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_pids(path: Path) -> list[int]:
    """A cgroup.procs file. A 0 is a process of a foreign pid namespace; as a kill target it would be us."""
    return [int(line) for line in (read_text(path) or "").split() if line.isdigit() and line != "0"]


def remove_group(path: Path) -> None:
    """rmdir of a group and the groups below it, deepest first; its files go with it. Raises OSError."""
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            remove_group(Path(entry.path))
    os.rmdir(path)

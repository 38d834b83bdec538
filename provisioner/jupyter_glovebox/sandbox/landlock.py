"""Landlock, the second floor under the mount namespace: what may be written, and what lies outside.

The rules are made here from the table of mounts and are put in force by the inner stage, inside and
before the command. Reading and executing are granted beneath the sandbox's root, so a name that is
reached outside it (a leaked descriptor, a hole in the mount namespace) stays closed. Writing is granted
beneath writable mounts, for device nodes and, unless root started the sandbox, for /proc (whose dangerous
parts are mounted read-only as well).

Source: landlock(7); include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from .base import Mounted

SYS_CREATE_RULESET = 444
_CREATE_RULESET_VERSION = 1

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0
SCOPE_SIGNAL = 1 << 1

LOWEST_ABI = 2
"""Before ABI 2 (Linux 5.19) Landlock forbids every rename between folders, which breaks honest programs."""
WHOLE_ABI = 6
"""From ABI 6 (Linux 6.12) on, truncation, device ioctls, abstract sockets and signals are covered too."""

_READ = EXECUTE | READ_FILE | READ_DIR
# No MAKE_CHAR and no MAKE_BLOCK: nothing inside needs a device node.
_WRITE = (
    _READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
    | REFER | TRUNCATE
)  # fmt: skip


class Ruleset(NamedTuple):
    """What the stage puts in force. Plain values: it crosses into the sandbox.

    Attributes:
        abi: the kernel's Landlock ABI.
        handled_fs, scoped: bit masks of struct landlock_ruleset_attr.
        rules: (absolute folder inside, allowed access) of each path-beneath rule.
    """

    abi: int
    handled_fs: int
    scoped: int
    rules: tuple[tuple[str, int], ...]


def detect_abi() -> int:
    """The kernel's Landlock ABI, 0 where it has none or has it switched off."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(
        ctypes.c_long(SYS_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_long(_CREATE_RULESET_VERSION)
    )
    return max(0, int(abi))


def ruleset(mounts: tuple[Mounted, ...], abi: int, *, root: bool) -> Ruleset | None:
    """The rules for a sandbox with these mounts, None where Landlock is missing or too old to be used.

    Args:
        root: started by root, whom /proc would let change the machine.
    """
    if abi < LOWEST_ABI:
        return None
    handled = (1 << 14) - 1
    handled |= TRUNCATE if abi >= 3 else 0
    handled |= IOCTL_DEV if abi >= 5 else 0
    rules = [
        ("/", _READ),
        ("/dev", _READ | WRITE_FILE | TRUNCATE | IOCTL_DEV),
    ]
    if not root:
        rules.append(("/proc", _READ | WRITE_FILE | TRUNCATE))
    rules += [(m.target, _WRITE) for m in mounts if m.writable]
    return Ruleset(
        abi=abi,
        handled_fs=handled,
        scoped=SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if abi >= 6 else 0,
        rules=tuple((path, rights & handled) for path, rights in rules),
    )

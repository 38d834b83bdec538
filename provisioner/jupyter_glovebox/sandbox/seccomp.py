"""The two seccomp filters, assembled by hand as classic BPF.

`deny_filter` answers denied calls with an errno and never kills: honest programs probe. `notify_filter`
hands watched calls to the supervisor. No call is in both, since an errno outranks a notification.

Sources: seccomp(2), bpf(4) instruction classes, linux/filter.h, linux/audit.h, ioctl_tty(2), clone(2).
"""

from __future__ import annotations

import functools
import platform
import struct

from .syscalls import (
    CONDITIONAL,
    DENIED,
    EAFNOSUPPORT,
    ENOSYS,
    EPERM,
    ESOCKTNOSUPPORT,
    NEWEST,
    WATCHED,
    WATCHED_WITH_ADDRESS,
    column,
)

_LOAD, _JEQ, _JGE, _JGT, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x25, 0x45, 0x54, 0x06
_ALLOW, _ERRNO, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
_NR, _ARCH, _ARGS = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET (clone(2)).
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_DGRAM, _SOCK_RAW = 2, 3


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One struct sock_filter: opcode, jump if true, jump if false, operand."""
    return struct.pack("=HBBI", code, yes, no, value)


def _errno(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


def _low(argument: int) -> bytes:
    """Load the low 32 bits of an argument (both machines are little-endian)."""
    return _op(_LOAD, _ARGS + 8 * argument)


def _high(argument: int) -> bytes:
    return _op(_LOAD, _ARGS + 8 * argument + 4)


def _head(machine: str) -> bytes:
    """Other machines' calls and x32 answer ENOSYS; the call's number stays loaded."""
    program = _op(_LOAD, _ARCH) + _op(_JEQ, _AUDIT_ARCH[machine], 1, 0) + _errno(ENOSYS) + _op(_LOAD, _NR)
    if machine == "x86_64":
        program += _op(_JGE, _X32_BIT, 0, 1) + _errno(ENOSYS)
    return program


def _when(number: int, block: bytes) -> bytes:
    """`block` (which returns) for one call's number, else go on behind it."""
    return _op(_JEQ, number, 0, len(block) // 8) + block


@functools.lru_cache(maxsize=4)
def deny_filter(machine: str | None = None) -> bytes:
    """The filter of denied calls, as an array of struct sock_filter.

    Args:
        machine: as platform.machine() says; default: this one.

    Raises:
        KeyError: a machine without a table.
    """
    machine = machine or platform.machine()
    at = column(machine)
    program = _head(machine) + _op(_JGT, NEWEST, 0, 1) + _errno(ENOSYS)
    for x86, arm, error, _ in DENIED.values():
        if (number := (x86, arm)[at]) is not None:
            program += _when(number, _errno(error))
    allow = _op(_RET, _ALLOW)
    # A Unix datagram can be sent to any socket file in reach, by calls whose address no filter sees.
    # The kernel takes SOCK_RAW for SOCK_DGRAM here; the upper bits of the type are flags.
    no_datagrams = (
        _low(1)
        + _op(_AND, 0xF)
        + _op(_JEQ, _SOCK_DGRAM, 2, 0)
        + _op(_JEQ, _SOCK_RAW, 1, 0)
        + allow
        + _errno(ESOCKTNOSUPPORT)
    )
    rules = {
        "clone": _low(0) + _op(_JSET, _NEW_NAMESPACES, 0, 1) + _errno(EPERM) + allow,
        "ioctl": _low(1) + _op(_JEQ, _TIOCSTI, 1, 0) + _op(_JEQ, _TIOCLINUX, 0, 1) + _errno(EPERM) + allow,
        # Only the default and the question for the current one.
        "personality": _low(0) + _op(_JEQ, 0, 2, 0) + _op(_JEQ, 0xFFFFFFFF, 1, 0) + _errno(EPERM) + allow,
        "socket": _low(0)
        + _op(_JEQ, _AF_UNIX, 7, 0)
        + _op(_JEQ, _AF_INET, 5, 0)
        + _op(_JEQ, _AF_INET6, 4, 0)
        + _op(_JEQ, _AF_NETLINK, 0, 2)
        + _low(2)
        + _op(_JEQ, 0, 1, 0)  # NETLINK_ROUTE: getifaddrs(3)
        + _errno(EAFNOSUPPORT)
        + allow
        + no_datagrams,
        "socketpair": _low(0) + _op(_JEQ, _AF_UNIX, 1, 0) + _errno(EAFNOSUPPORT) + no_datagrams,
    }
    for name, numbers in CONDITIONAL.items():
        program += _when(numbers[at], rules[name])
    return program + allow


@functools.lru_cache(maxsize=4)
def notify_filter(level: str = "standard", machine: str | None = None) -> bytes:
    """The filter of watched calls, as an array of struct sock_filter.

    Args:
        level: `standard` is the only one of this version.
        machine: as for `deny_filter`.

    Raises:
        ValueError: an unknown level.
        KeyError: a machine without a table.
    """
    if level != "standard":
        raise ValueError(f"observation level {level!r} is not available")
    machine = machine or platform.machine()
    at = column(machine)
    notify = _op(_RET, _NOTIFY)
    program = _head(machine)
    for x86, arm, _ in WATCHED.values():
        if (number := (x86, arm)[at]) is not None:
            program += _when(number, notify)
    for with_address in WATCHED_WITH_ADDRESS.values():
        block = _low(4) + _op(_JEQ, 0, 0, 2) + _high(4) + _op(_JEQ, 0, 1, 0) + notify + _op(_RET, _ALLOW)
        program += _when(int(with_address[at]), block)
    return program + _op(_RET, _ALLOW)

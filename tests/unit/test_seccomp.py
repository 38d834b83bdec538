"""The two filters, evaluated instruction by instruction for every call, against the tables."""

from __future__ import annotations

import struct

import pytest
from jupyter_glovebox.sandbox import seccomp, syscalls

ALLOW, NOTIFY, ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = list(ARCH)


def run(program: bytes, nr: int, arch: int, args: tuple[int, ...] = ()) -> int:
    """Evaluate classic BPF over a struct seccomp_data, as the kernel does."""
    data = struct.pack(
        "=iIQ6Q", nr & 0x7FFFFFFF if nr >= 0 else nr, arch, 0, *(*args, *[0] * (6 - len(args)))
    )
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        op, yes, no, value = code[at]
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif op == 0x06:
            return value
        elif op == 0x54:
            accumulator &= value
        else:
            holds = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[op]
            at += yes if holds else no


def _number(entry: tuple[object, ...], machine: str) -> int | None:
    number = entry[syscalls.column(machine)]
    assert number is None or isinstance(number, int)
    return number


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_gets_what_the_tables_say(machine: str) -> None:
    deny, notify = seccomp.deny_filter(machine), seccomp.notify_filter(machine=machine)
    denied = {n: e[2] for e in syscalls.DENIED.values() if (n := _number(e, machine)) is not None}
    watched = {n for e in syscalls.WATCHED.values() if (n := _number(e, machine)) is not None}
    conditional = {_number(e, machine) for e in syscalls.CONDITIONAL.values()}
    for number in range(1024):
        expected = ERRNO | denied[number] if number in denied else ALLOW
        if number > syscalls.NEWEST:
            expected = ERRNO | syscalls.ENOSYS
        if number not in conditional:
            assert run(deny, number, ARCH[machine]) == expected, number
        assert run(notify, number, ARCH[machine]) == (NOTIFY if number in watched else ALLOW), number


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_is_in_both(machine: str) -> None:
    """An errno outranks a notification: a call in both would never reach the supervisor."""
    numbers = [
        {n for e in table.values() if (n := _number(e, machine)) is not None}
        for table in (
            syscalls.DENIED,
            {**syscalls.WATCHED, **syscalls.WATCHED_WITH_ADDRESS},
            syscalls.CONDITIONAL,
        )
    ]
    assert not numbers[0] & numbers[1]
    assert not numbers[1] & numbers[2]
    assert not numbers[0] & numbers[2]


def test_never_watched() -> None:
    """Calls that programs do not retry after a signal must not sleep in a notification."""
    for name in ("close", "read", "write", "fork", "vfork", "clone", "futex"):
        assert name not in syscalls.WATCHED


@pytest.mark.parametrize("machine", MACHINES)
def test_other_machines_and_x32(machine: str) -> None:
    for program in (seccomp.deny_filter(machine), seccomp.notify_filter(machine=machine)):
        assert run(program, 0, 0x40000003) == ERRNO | syscalls.ENOSYS
        if machine == "x86_64":
            assert run(program, 0x40000000, ARCH[machine]) == ERRNO | syscalls.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "args", "error"),
    [
        ("clone", (0x11,), None),
        ("clone", (0x10000000,), syscalls.EPERM),
        ("clone", (0x00020000 | 0x11,), syscalls.EPERM),
        ("clone", (0x3D0F00,), None),  # pthread_create
        ("ioctl", (0, 0x5401), None),
        ("ioctl", (0, 0x5412), syscalls.EPERM),
        ("ioctl", (0, 0x1_0000_5412), syscalls.EPERM),  # the kernel looks at 32 bits
        ("ioctl", (0, 0x541C), syscalls.EPERM),
        ("personality", (0,), None),
        ("personality", (0xFFFFFFFF,), None),
        ("personality", (0x0040000,), syscalls.EPERM),
        ("socket", (1, 1, 0), None),
        ("socket", (2, 1, 0), None),
        ("socket", (10, 2, 0), None),
        ("socket", (16, 3, 0), None),
        ("socket", (16, 3, 9), syscalls.EAFNOSUPPORT),
        ("socket", (40, 1, 0), syscalls.EAFNOSUPPORT),
        ("socket", (17, 3, 0), syscalls.EAFNOSUPPORT),
        ("socketpair", (1, 1, 0), None),
        ("socketpair", (1, 2, 0), syscalls.ESOCKTNOSUPPORT),
        ("socketpair", (1, 3, 0), syscalls.ESOCKTNOSUPPORT),
        ("socketpair", (1, 5 | 0o2000000, 0), None),
        ("socket", (1, 1 | 0o2004000, 0), None),
        ("socket", (1, 2, 0), syscalls.ESOCKTNOSUPPORT),
        ("socket", (1, 2 | 0o2004000, 0), syscalls.ESOCKTNOSUPPORT),
        ("socket", (1, 3, 0), syscalls.ESOCKTNOSUPPORT),
        ("socket", (1, 5, 0), None),
        ("socket", (2, 2, 0), None),
        ("socket", (2, 3, 0), None),
        ("socketpair", (2, 1, 0), syscalls.EAFNOSUPPORT),
    ],
)
def test_conditional_calls(machine: str, call: str, args: tuple[int, ...], error: int | None) -> None:
    number = _number(syscalls.CONDITIONAL[call], machine)
    assert number is not None
    result = run(seccomp.deny_filter(machine), number, ARCH[machine], args)
    assert result == (ALLOW if error is None else ERRNO | error)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("address", "seen"), [(0, False), (1, True), (1 << 32, True), (0x7FFF_0000_0000, True)]
)
def test_sendto_only_with_an_address(machine: str, address: int, seen: bool) -> None:
    number = _number(syscalls.WATCHED_WITH_ADDRESS["sendto"], machine)
    assert number is not None
    program = seccomp.notify_filter(machine=machine)
    assert run(program, number, ARCH[machine], (3, 0, 0, 0, address)) == (NOTIFY if seen else ALLOW)


def test_jumps_and_lengths() -> None:
    """The kernel takes at most 4096 instructions; jumps never leave the program (run would raise)."""
    for machine in MACHINES:
        for program in (seccomp.deny_filter(machine), seccomp.notify_filter(machine=machine)):
            assert len(program) % 8 == 0
            assert len(program) // 8 < 4096


def test_unknown_level_and_machine() -> None:
    with pytest.raises(ValueError, match="strict"):
        seccomp.notify_filter("strict")
    with pytest.raises(KeyError):
        seccomp.deny_filter("riscv64")

"""The filters in the real kernel: a forked child puts one on, and makes the calls."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.sandbox import seccomp, syscalls
from jupyter_glovebox.sandbox.stage import notify

AT = syscalls.column(platform.machine())
SECCOMP = {"x86_64": 317, "aarch64": 277}[platform.machine()]
EFAULT_POINTER = 8  # in the first page, which is never mapped

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(number: int, *args: int) -> int:
    """0 or an errno, for any call; descriptors that it gives are closed."""
    words = [ctypes.c_ulong(a & 0xFFFFFFFFFFFFFFFF) for a in (*args, *[0] * (6 - len(args)))]
    ctypes.set_errno(0)
    return 0 if libc.syscall(ctypes.c_long(number), *words) >= 0 else ctypes.get_errno()


def install(program: bytes) -> None:
    """Put a filter without a listener on the calling thread."""
    text = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(text))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(SECCOMP, 1, 0, ctypes.c_char_p(fprog)) == 0, ctypes.get_errno()


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, by way of JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(text)


def under(program: bytes, work: Callable[[], Any]) -> Any:
    def _work() -> Any:
        install(program)
        return work()

    return in_child(_work)


def _denied() -> dict[str, tuple[int, int]]:
    return {n: (e[AT], e[2]) for n, e in syscalls.DENIED.items() if e[AT] is not None}  # type: ignore[misc]


def test_every_denied_call_answers_its_errno() -> None:
    denied = _denied()
    # Positive control: without the filter these reach the kernel's own checks. (The others cannot be
    # tried outside by root without doing harm.)
    for name in ("keyctl", "mount", "setns", "name_to_handle_at", "process_vm_readv", "io_uring_setup"):
        number, error = denied[name]
        assert in_child(lambda n=number: call(n, EFAULT_POINTER, EFAULT_POINTER, EFAULT_POINTER)) != error, (
            name
        )
    assert in_child(lambda: call(denied["unshare"][0], 0)) == 0
    found = under(seccomp.deny_filter(), lambda: {name: call(number) for name, (number, _) in denied.items()})
    assert found == {name: error for name, (_, error) in denied.items()}


def _header(path: str) -> dict[str, int]:
    text = Path(path).read_text()
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", text, re.MULTILINE)
    return {name: int(number) for name, number in found}


@pytest.mark.parametrize(
    ("at", "path"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_the_kernel(at: int, path: str) -> None:
    """Against the kernel's own headers, as far as this machine's are new enough."""
    if not os.path.exists(path):
        pytest.skip("no kernel headers (Debian: linux-libc-dev)")
    header = _header(path)
    assert len(header) > 250
    tables: list[dict[str, Any]] = [
        syscalls.DENIED, syscalls.CONDITIONAL, syscalls.WATCHED, syscalls.WATCHED_WITH_ADDRESS
    ]  # fmt: skip
    ours = {name: entry[at] for table in tables for name, entry in table.items()}
    newest = max(n for name, n in header.items() if name not in ("syscalls", "arch_specific_syscall"))
    assert newest <= syscalls.NEWEST
    for name, number in ours.items():
        if number is None or number <= newest:
            assert header.get(name) == number, name


def test_what_must_be_denied() -> None:
    """A table that loses one of these has lost a wall."""
    assert {
        "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "keyctl", "add_key", "request_key",
        "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "unshare",
        "setns", "clone3", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig",
        "fsmount", "fspick", "mount_setattr", "kexec_load", "kexec_file_load", "init_module", "finit_module",
        "delete_module", "reboot", "swapon", "swapoff", "acct", "quotactl", "syslog", "iopl", "ioperm", "modify_ldt",
        "name_to_handle_at", "open_by_handle_at", "fanotify_init", "lookup_dcookie", "vhangup", "settimeofday",
        "clock_settime", "clock_adjtime",
    } <= set(syscalls.DENIED)  # fmt: skip
    assert set(syscalls.CONDITIONAL) == {"clone", "ioctl", "personality", "socket", "socketpair"}


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("ioctl", (-1, 0x5401), errno.EBADF),
        ("ioctl", (-1, 0x5412), errno.EPERM),
        ("ioctl", (-1, 0x7_0000_5412), errno.EPERM),
        ("ioctl", (-1, 0x541C), errno.EPERM),
        ("personality", (0xFFFFFFFF,), 0),
        ("personality", (0x0040000,), errno.EPERM),
        ("socket", (socket.AF_INET, socket.SOCK_STREAM, 0), 0),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 0), 0),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 9), errno.EAFNOSUPPORT),
        ("socket", (40, socket.SOCK_STREAM, 0), errno.EAFNOSUPPORT),
        ("socket", (1 << 32 | 40, socket.SOCK_STREAM, 0), errno.EAFNOSUPPORT),
        ("clone", (0x10000000 | 17,), errno.EPERM),
        ("clone", (1 << 32 | 0x00020000 | 17,), errno.EPERM),
    ],
)
def test_conditional_calls(name: str, args: tuple[int, ...], error: int) -> None:
    number = syscalls.CONDITIONAL[name][AT]
    assert under(seccomp.deny_filter(), lambda: call(number, *args)) == error


def test_honest_programs_run_under_the_deny_filter() -> None:
    """Threads (clone3 falls back to clone), children, memfd, and a filter of the program's own."""

    def _work() -> list[object]:
        done: list[object] = []
        thread = threading.Thread(target=done.append, args=("thread",))
        thread.start()
        thread.join()
        done.append(os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]))
        os.close(os.memfd_create("x"))
        install(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
        return done

    assert under(seccomp.deny_filter(), _work) == ["thread", 0]


def test_every_watched_call_is_notified() -> None:
    """The listener hears each call of the table, by its number, and no other."""
    watched = {name: entry[AT] for name, entry in syscalls.WATCHED.items() if entry[AT] is not None}
    watched |= {name: entry[AT] for name, entry in syscalls.WATCHED_WITH_ADDRESS.items()}
    ours, theirs = socket.socketpair()
    answer = 77  # an errno that none of them gives
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            libc.prctl(38, 1, 0, 0, 0)
            install(seccomp.deny_filter())  # as in a sandbox: it must not hide a watched call
            socket.send_fds(theirs, [b"l"], [notify(seccomp.notify_filter())])
            theirs.recv(1)
            # sendto: the fifth argument is the address.
            found = {n: call(number, 0, 0, 0, 0, EFAULT_POINTER) for n, number in watched.items()}
            found["read"] = call({"x86_64": 0, "aarch64": 63}[platform.machine()], -1)
            found["send"] = call(syscalls.WATCHED_WITH_ADDRESS["sendto"][AT], -1)
            theirs.sendall(json.dumps(found).encode())
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    heard = []
    waiting = select.poll()
    waiting.register(fds[0], select.POLLIN)
    ours.sendall(b"g")
    while not (ready := waiting.poll(20_000)) or not ready[0][1] & select.POLLHUP:
        assert ready, "the child is stuck"
        message = bytearray(80)
        fcntl.ioctl(fds[0], 0xC0502100, message)
        ident, caller = struct.unpack_from("=QI", message)
        assert caller == pid
        heard.append(struct.unpack_from("=i", message, 16)[0])
        fcntl.ioctl(fds[0], 0xC0182101, struct.pack("=QqiI", ident, 0, -answer, 0))
    os.close(fds[0])
    found = json.loads(ours.recv(1 << 16))
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert heard == list(watched.values())
    assert found.pop("read") == found.pop("send") == errno.EBADF
    assert found == dict.fromkeys(watched, answer)

"""Blocked accesses in a real kernel: each is an event of the right kind, or rightly none."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.ledger.events import Event

from .support import Kernel, until

Start = Callable[..., Kernel]
MANIFEST = "version: 1\nname: t\ninputs: [given.txt, folder]\noutputs: {types: [txt]}\n"
FILES = {"given.txt": b"given", "hidden.txt": b"hidden", "folder/a.txt": b"a"}


def _quote(text: str) -> str:
    return f"try:\n    {text}\nexcept OSError as error:\n    print(type(error).__name__)\n"


def _events(kernel: Kernel, ledger: Any) -> list[Event]:
    """Everything reported so far; a marker event shows that nothing is still on its way."""
    mark = f"/root/marker-{os.urandom(4).hex()}/.ssh/id_rsa"
    kernel.run(_quote(f"open({mark!r})"))
    found = until(
        lambda: [
            e
            for e in ledger(kernel.kernel_id)[0]
            if any(x.target == mark for x in ledger(kernel.kernel_id)[0])
        ],
        "the marker",
    )
    return [e for e in found if "marker-" not in e.target]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host folder that no manifest grants."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret.txt").write_text("secret")
    (folder / "tool").write_text("#!/bin/sh\necho ran\n")
    (folder / "tool").chmod(0o755)
    return folder


CASES: list[tuple[str, str, tuple[str, str, str] | None]] = [
    # (code, what it prints, (class, operation, target) or None)
    ("open('{out}/secret.txt')", "PermissionError", ("not-granted", "open", "{out}/secret.txt")),
    ("open('hidden.txt')", "PermissionError", ("not-granted", "open", "{work}/hidden.txt")),
    ("open('../work/./hidden.txt')", "PermissionError", ("not-granted", "open", "{work}/hidden.txt")),
    ("open('/nowhere/at/all')", "FileNotFoundError", None),
    ("open('absent.txt')", "FileNotFoundError", None),
    ("open('given.txt').close()", "", None),
    ("open('given.txt', 'w')", "OSError", ("read-only", "open", "{work}/given.txt")),
    ("open('folder/new.txt', 'w')", "OSError", ("read-only", "open", "{work}/folder/new.txt")),
    ("os.remove('given.txt')", "OSError", ("read-only", "delete", "{work}/given.txt")),
    ("os.rename('given.txt', 'x')", "OSError", ("read-only", "rename", "{work}/given.txt")),
    ("os.mkdir('folder/sub')", "OSError", ("read-only", "create", "{work}/folder/sub")),
    ("os.chmod('given.txt', 0o777)", "OSError", ("read-only", "change", "{work}/given.txt")),
    ("open('{out}/new.txt', 'w')", "PermissionError", ("not-granted", "open", "{out}/new.txt")),
    ("os.mkdir('{out}/sub')", "PermissionError", ("not-granted", "create", "{out}/sub")),
    ("os.remove('{out}/secret.txt')", "PermissionError", ("not-granted", "delete", "{out}/secret.txt")),
    (
        "os.rename('{out}/secret.txt', 'stolen')",
        "PermissionError",
        ("not-granted", "rename", "{out}/secret.txt"),
    ),
    ("os.link('{out}/secret.txt', 'l')", "PermissionError", ("not-granted", "link", "{out}/secret.txt")),
    ("os.truncate('{out}/secret.txt', 0)", "PermissionError", ("not-granted", "change", "{out}/secret.txt")),
    ("subprocess.run(['{out}/tool'])", "PermissionError", ("not-granted", "exec", "{out}/tool")),
    ("os.open('secret.txt', 0, dir_fd=os.open('/', os.O_PATH))", "FileNotFoundError", None),
    (
        "os.open('{out}/secret.txt'.lstrip('/'), 0, dir_fd=os.open('/', os.O_PATH))",
        "PermissionError",
        ("not-granted", "open", "{out}/secret.txt"),
    ),
    ("os.chdir('/'), open('{out}/secret.txt'[1:])", "PermissionError", ("not-granted", "open", "{out}/secret.txt")),
    ("open('/etc/shadow')", "PermissionError", ("not-granted", "open", "/etc/shadow")),
    (
        "open(os.path.expanduser('~/.aws/credentials'))",
        "FileNotFoundError",
        ("not-granted", "open", "~/.aws/credentials"),
    ),
    ("open('x' * 5000)", "OSError", None),
    ("open(b'\\xff\\n\\x1b[31m')", "FileNotFoundError", None),
    ("socket.create_connection(('192.0.2.1', 443), 5)", "PermissionError", ("network", "connect", "192.0.2.1:443")),
    (
        "socket.create_connection(('169.254.169.254', 80), 5)",
        "PermissionError",
        ("network", "connect", "169.254.169.254:80"),
    ),
    ("socket.create_connection(('2001:db8::1', 80), 5)", "PermissionError", ("network", "connect", "[2001:db8::1]:80")),
    ("socket.create_connection(('127.0.0.1', 9), 5)", "ConnectionRefusedError", None),
    ("socket.getaddrinfo('data.example.com', 443)", "gaierror", ("network", "lookup", "data.example.com")),
    (
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        "PermissionError",
        ("network", "connect", "192.0.2.1:53"),
    ),
    (
        "socket.socket(socket.AF_UNIX).connect('{out}/host.sock')",
        "PermissionError",
        ("not-granted", "connect", "{out}/host.sock"),
    ),
]  # fmt: skip


def test_the_corpus(start: Start, ledger: Any, outside: Path, tmp_path: Path) -> None:
    """Each case: what the program gets, and exactly the event it should make, at its own cell."""
    work = tmp_path / "work"

    def fill(text: str) -> str:
        return text.replace("{out}", str(outside)).replace("{work}", str(work))

    with socket.socket(socket.AF_UNIX) as listener:
        # Positive control: outside, all of this works.
        listener.bind(str(outside / "host.sock"))
        listener.listen()
        assert (outside / "secret.txt").read_text() == "secret"
        assert subprocess.run([outside / "tool"], capture_output=True, text=True).stdout == "ran\n"
        kernel = start(MANIFEST, files=FILES)
        kernel.run("import os, socket, subprocess; home = os.getcwd()")
        expected: list[tuple[int, str, str, str]] = []
        for code, prints, event in CASES:
            out, reply = kernel.run(_quote(fill(code)) + "os.chdir(home)")
            assert out.strip() == prints, code
            if event is not None:
                target = fill(event[2]).replace("~", os.path.expanduser("~"))
                expected.append((reply["execution_count"], event[0], event[1], target))
        events = _events(kernel, ledger)
    found = [(e.cell.execution_count, e.event_class, e.operation, e.target) for e in events if e.cell]
    assert found == expected
    assert len(found) == len(events)
    assert (outside / "secret.txt").read_text() == "secret"
    sensitive = {e.target for e in events if e.sensitive}
    assert sensitive >= {"/etc/shadow", "169.254.169.254:80"}
    for event in events:
        assert event.suggestion
        assert event.process
        assert event.process.comm


def test_a_c_program_threads_and_children(start: Start, ledger: Any, outside: Path, tmp_path: Path) -> None:
    source = tmp_path / "reader.c"
    source.write_text(
        "#include <fcntl.h>\n#include <stdio.h>\n#include <errno.h>\n"
        'int main(int c, char **v) { int f = open(v[1], O_RDONLY); printf("%d\\n", f < 0 ? errno : 0); return 0; }\n'
    )
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["gcc", "-o", str(work / "reader"), str(source)], check=True)
    secret = outside / "secret.txt"
    assert subprocess.run([work / "reader", secret], capture_output=True, text=True).stdout == "0\n"
    kernel = start("version: 1\nname: t\ninputs: [reader]\n")
    out, _ = kernel.run(
        f"import subprocess; print(subprocess.check_output(['./reader', {str(secret)!r}], text=True))"
    )
    assert out.split() == ["13"]
    kernel.run(
        "import threading\ndef work():\n    try: open("
        + repr(str(outside / "from-thread"))
        + ", 'w')\n    except OSError: pass\n"
        "t = [threading.Thread(target=work) for _ in range(20)]\n[x.start() for x in t]; [x.join() for x in t]"
    )
    events = _events(kernel, ledger)
    (child,) = [e for e in events if e.target == str(secret)]
    assert child.process
    assert child.process.comm == "reader"
    assert str(secret) in child.process.cmdline

    def from_threads() -> int:
        return sum(e.count for e in ledger(kernel.kernel_id)[0] if e.target.endswith("from-thread"))

    until(lambda: from_threads() == 20, "every thread's attempt")


def test_a_storm_is_bounded_and_counted(start: Start, ledger: Any, outside: Path) -> None:
    kernel = start()
    kernel.run(f"""
import threading
def storm(n):
    for i in range(1500):
        try: open({str(outside)!r} + f'/secret.txt')
        except OSError: pass
t = [threading.Thread(target=storm, args=(n,)) for n in range(4)]
[x.start() for x in t]; [x.join() for x in t]
""")
    assert kernel.run("1 + 1")[0] == "2"
    until(lambda: sum(e.count for e in ledger(kernel.kernel_id)[0]) == 6000, "every attempt to be counted")
    events = ledger(kernel.kernel_id)[0]
    assert {e.event_class for e in events} <= {"not-granted", "observation"}
    assert len(events) < 60


def test_signals_do_not_break_a_watched_call(start: Start) -> None:
    """A program that is interrupted all the time still opens its files."""
    kernel = start(MANIFEST, files=FILES)
    out, _ = kernel.run("""
import signal, os
hits = 0
def handler(*_):
    global hits
    hits += 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
try:
    for _ in range(3000):
        os.close(os.open('given.txt', 0))
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
print(hits > 10)
""")
    assert out == "True\n"


def test_the_hidden_file_of_a_changed_input_is_reported(start: Start, ledger: Any, tmp_path: Path) -> None:
    kernel = start(MANIFEST, files=FILES)
    kernel.run("1")
    (tmp_path / "work/given.txt").write_text("changed by the host")
    kernel.run("2")
    (stale,) = until(
        lambda: [e for e in ledger(kernel.kernel_id)[0] if e.event_class == "input-stale"], "the event"
    )
    assert stale.target == str(tmp_path / "work/given.txt")


def test_when_the_supervisor_stalls_nothing_opens(start: Start, outside: Path) -> None:
    """Unanswered calls wait, and fail when the supervisor dies: closed, never open."""
    import signal
    import time

    from jupyter_glovebox.locations import runtime_dir
    from jupyter_glovebox.supervisor.state import read_states

    kernel = start()
    client = kernel.connect()
    (state,) = read_states(runtime_dir())
    mark = outside / "opened"
    client.execute(f"import time; time.sleep(0.5); open({str(mark)!r}, 'w').close()")
    time.sleep(0.2)
    os.kill(state.supervisor_pid, signal.SIGSTOP)
    time.sleep(1.5)
    assert not mark.exists()
    os.kill(state.supervisor_pid, signal.SIGKILL)
    until(lambda: not kernel.manager.is_alive(), "the end")
    assert not mark.exists()
    assert threading.active_count() < 50

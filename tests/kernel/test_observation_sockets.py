"""No way to a socket of the host, also when it appears in a granted folder after the start."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import Kernel, until

Start = Callable[..., Kernel]
MANIFEST = "version: 1\nname: t\ninputs: [folder]\n"
RACE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <netinet/in.h>
/* One thread connects; another swaps the address (own socket, host socket) and the descriptor (TCP, Unix). */
static struct sockaddr_un shared, own, host;
static volatile int stop, fd = 99;
static int tcp;
static void *swap(void *unused) {
    unsigned random = 1;
    while (!stop) {
        random = random * 1103515245 + 12345;
        memcpy(&shared, random >> 16 & 1 ? &host : &own, sizeof shared);
        if ((random >> 17 & 3) == 0) dup2(tcp, fd);
        if ((random >> 17 & 3) == 1) { int s = socket(AF_UNIX, SOCK_STREAM, 0); dup2(s, fd); close(s); }
    }
    return unused;
}
int main(int count, char **names) {
    own.sun_family = host.sun_family = AF_UNIX;
    strcpy(own.sun_path, names[1]);
    strcpy(host.sun_path, names[2]);
    tcp = socket(AF_INET, SOCK_STREAM, 0);
    memcpy(&shared, &own, sizeof shared);
    pthread_t thread;
    pthread_create(&thread, 0, swap, 0);
    int done = 0;
    for (int n = 0; n < atoi(names[3]); n++) {
        int s = socket(AF_UNIX, SOCK_STREAM, 0);
        dup2(s, fd);
        close(s);
        done += connect(fd, (struct sockaddr *)&shared, sizeof shared) == 0;
    }
    stop = 1;
    pthread_join(thread, 0);
    printf("%d\n", done);
    return 0;
}
"""


class HostService:
    """Listens on a socket file, and counts who comes."""

    def __init__(self, path: Path) -> None:
        self.visits = 0
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        path.chmod(0o777)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer:
                if peer.recv(16) == b"end":
                    return
                self.visits += 1

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(str(self.path))
            s.sendall(b"end")
        self._thread.join()
        self._listener.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[[str], HostService]]:
    services: list[HostService] = []

    def _service(name: str) -> HostService:
        (tmp_path / "work/folder").mkdir(parents=True, exist_ok=True)
        services.append(HostService(tmp_path / "work/folder" / name))
        return services[-1]

    yield _service
    for each in services:
        each.close()


def test_a_socket_that_appears_in_an_input(start: Start, service: Any, ledger: Any, tmp_path: Path) -> None:
    kernel = start(MANIFEST, files={"folder/a.txt": b"a"})
    kernel.run("import os, socket")
    late = service("late.sock")
    with socket.socket(socket.AF_UNIX) as s:  # positive control: outside it can be reached
        s.connect(str(late.path))
    until(lambda: late.visits == 1, "the control")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with datagrams:
        datagrams.bind(str(tmp_path / "work/folder/late.dgram"))
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with one, other:
            one.sendto(b"x", str(tmp_path / "work/folder/late.dgram"))  # a pair reaches names as well
        assert datagrams.recv(1) == b"x"
        out, _ = kernel.run("""
def attempt(f):
    try: print("WORKED", f())
    except OSError as error: print(type(error).__name__, error.errno)
os.symlink("folder/late.sock", "link")
work = os.getcwd()
attempt(lambda: socket.socket(socket.AF_UNIX).connect("folder/late.sock"))
attempt(lambda: socket.socket(socket.AF_UNIX).connect(work + "/folder/late.sock"))
attempt(lambda: socket.socket(socket.AF_UNIX).connect("link"))
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect("link"))
folder = os.open("folder", os.O_PATH)
attempt(lambda: socket.socket(socket.AF_UNIX).connect(f"/proc/self/fd/{folder}/late.sock"))
attempt(lambda: socket.socket(socket.AF_UNIX).connect("/proc/self/root" + work + "/folder/late.sock"))
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
""")
        datagrams.setblocking(False)
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    assert "WORKED" not in out
    assert out.count("PermissionError 13\n") >= 4, out
    assert late.visits == 1
    events = until(lambda: [e for e in ledger(kernel.kernel_id)[0] if e.operation == "connect"], "the events")
    assert {e.event_class for e in events} == {"not-granted"}
    assert {e.target for e in events} == {str(late.path)}


def test_no_race_reaches_it(start: Start, service: Any, tmp_path: Path) -> None:
    """Address and descriptor change under the call, thousands of times: the host's service hears nothing."""
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    (tmp_path / "race.c").write_text(RACE)
    subprocess.run(
        ["gcc", "-O2", "-pthread", "-o", str(work / "folder/race"), str(tmp_path / "race.c")], check=True
    )
    kernel = start(MANIFEST)
    kernel.run("1")
    late = service("s")
    with HostServiceAt(tmp_path / "own") as own:
        # Positive control: outside, the same program comes to both.
        subprocess.run(
            [work / "folder/race", own.path, late.path, "2000"], check=True, stdout=subprocess.DEVNULL
        )
        until(lambda: own.visits and late.visits, "the control")
    until(lambda: _settled(late), "the last visit of the control")
    before = late.visits
    out, _ = kernel.run("""
import socket, subprocess, threading
listener = socket.socket(socket.AF_UNIX)
listener.bind("own")
listener.listen(128)
def serve():
    while True:
        listener.accept()[0].close()
threading.Thread(target=serve, daemon=True).start()
print(subprocess.run(["folder/race", "own", "folder/s", "4000"], capture_output=True, text=True).stdout)
""")
    assert int(out) > 100, "it must have come through to its own socket"
    assert _settled(late)
    assert late.visits == before


def _settled(service: HostService) -> bool:
    import time

    before = service.visits
    time.sleep(0.2)
    return service.visits == before


class HostServiceAt(HostService):
    def __enter__(self) -> HostServiceAt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_own_sockets_work(start: Start, ledger: Any) -> None:
    """Everything that honest programs do with Unix sockets among themselves."""
    kernel = start(MANIFEST, files={"folder/a.txt": b"a"})
    out, reply = kernel.run("""
import asyncio, multiprocessing as mp, multiprocessing.connection as connection, os, socket, threading, time
with mp.Manager() as manager:
    shared = manager.dict(a=1)
    assert dict(shared) == {"a": 1}
listener = connection.Listener(family="AF_UNIX")
threading.Thread(target=lambda: listener.accept().send("hello")).start()
assert connection.Client(listener.address).recv() == "hello"
for name in ("plain", "./dotted", "/tmp/in-tmp", "/dev/shm/in-shm", os.path.expanduser("~/in-home"), "\\0abstract"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as server, socket.socket(socket.AF_UNIX, kind) as client:
            server.bind(name); server.listen()
            client.connect(name)
            peer, _ = server.accept()
            client.send(b"x"); assert peer.recv(1) == b"x"; peer.close()
            if name[0] != "\\0": os.unlink(name)
# A connect that has to wait does wait, and neither stops the others.
server = socket.socket(socket.AF_UNIX); server.bind("full"); server.listen(0)
done = []
def late():
    s = socket.socket(socket.AF_UNIX); s.connect("full"); done.append(s)
threads = [threading.Thread(target=late) for _ in range(5)]
[t.start() for t in threads]
time.sleep(0.3)
assert len(done) < 5
open("plain-file", "w").close()
accepted = [server.accept()[0] for _ in range(5)]
[t.join(10) for t in threads]
assert len(done) == 5
s = socket.socket(socket.AF_UNIX); s.setblocking(False)
fill = []
for _ in range(5):
    f = socket.socket(socket.AF_UNIX); f.setblocking(False)
    fill.append((f, f.connect_ex("full")))
assert fill[-1][1] == __import__("errno").EAGAIN, fill
tcp = socket.create_server(("127.0.0.1", 0))
socket.create_connection(tcp.getsockname(), 5).close()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.connect(("127.0.0.1", 9))
print("fine")
""")
    assert reply["status"] == "ok", reply
    assert out == "fine\n"
    assert ledger(kernel.kernel_id)[0] == []

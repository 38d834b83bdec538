"""What a call means for a plan: a folder stands for the sandbox's root, and mounts are a table."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_glovebox.manifest.plan import Budgets, InputGrant, Outputs, Plan, Scratch
from jupyter_glovebox.sandbox.base import Mounted
from jupyter_glovebox.supervisor.classify import Classifier, Finding, dns_question
from jupyter_glovebox.supervisor.observation import _absolute

BUDGETS = Budgets(
    memory=1 << 30, cpus=1, cpu_time=60, wall_time=60, processes=64, open_files=256, display=1 << 20
)


class Place:
    """A host folder `out` of secrets, and a root with /usr, a working folder, an input and links."""

    def __init__(self, base: Path) -> None:
        self.out = base / "out"
        self.work = base / "work"
        self.input = base / "input"
        self.root = base / "root"
        for folder in (self.out, self.work, self.input):
            folder.mkdir()
        (self.out / "secret.csv").write_text("secret")
        (self.work / "hidden.csv").write_text("on the host, not granted")
        for folder in (self.work, self.input):
            (self.root / str(folder)[1:]).mkdir(parents=True)
        (self.root / "usr/lib").mkdir(parents=True)
        (self.inner(self.input) / "data.csv").write_text("granted")
        (self.inner(self.input) / "link.csv").symlink_to(self.out / "secret.csv")
        (self.inner(self.input) / "folder-link").symlink_to(self.out)
        (self.inner(self.input) / "good-link").symlink_to("data.csv")
        (self.inner(self.work) / "mine").symlink_to(self.out / "secret.csv")
        (self.inner(self.work) / "hop").symlink_to("mine")
        (self.inner(self.work) / "loop").symlink_to("loop")
        (self.inner(self.work) / "own.txt").write_text("own")
        (self.inner(self.work) / "dangling").symlink_to("not-yet.txt")

    def inner(self, path: Path) -> Path:
        return self.root / str(path)[1:]

    def classifier(self, fd: int, denials: Any = "explicit") -> Classifier:
        plan = Plan(
            name="t", baseline=False, notebook=None, workdir=str(self.work), isolation="bubblewrap",
            workload="generated-code", scratch=Scratch(size=1 << 20), budgets=BUDGETS, policy="sha256:0",
            denials=denials,
            inputs=(InputGrant(path=str(self.input), source=str(self.input), kind="directory"),),
            outputs=Outputs(max_files=1, max_file_size=1, max_total_size=1, types=("csv",)),
        )  # fmt: skip
        mounts = (
            Mounted(target="/usr", writable=False, source="/usr"),
            Mounted(target="/proc", writable=False),
            Mounted(target=str(self.work), writable=True),
            Mounted(target=str(self.input), writable=False, source=str(self.input)),
        )
        return Classifier(plan, mounts, fd, ("/home/someone",))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def fd(place: Place) -> Iterator[int]:
    number = os.open(place.root, os.O_PATH)
    yield number
    os.close(number)


Judge = Callable[..., Finding | None]


@pytest.fixture
def judge(place: Place, fd: int) -> Judge:
    classifier = place.classifier(fd)

    def _judge(path: object, operation: str = "open", *, writes: bool = False, creates: bool = False,
               follows: bool = True) -> Finding | None:  # fmt: skip
        return classifier.path(operation, str(path), writes=writes, creates=creates, follows=follows)

    return _judge


def _denied(finding: Finding | None, target: object, error: int | None = errno.EACCES) -> None:
    assert finding is not None
    assert (finding.event_class, finding.target, finding.error) == ("not-granted", str(target), error)


def test_granted_and_absent_names_are_no_event(judge: Judge, place: Place) -> None:
    for path in (
        place.input / "data.csv", place.input / "good-link", place.input / "absent.csv", place.work / "own.txt",
        place.work / "absent", place.work, "/usr/lib/python3/absent.so", "/nowhere", "/", "/proc/1/status",
    ):  # fmt: skip
        assert judge(path) is None, path


def test_a_hidden_name_is_denied_with_the_line_that_would_grant_it(judge: Judge, place: Place) -> None:
    finding = judge(place.out / "secret.csv")
    _denied(finding, place.out / "secret.csv")
    assert finding
    assert finding.suggestion == f'inputs: ["{place.out}/secret.csv"]'
    beside = judge(place.work / "hidden.csv")
    assert beside
    assert beside.suggestion == 'inputs: ["hidden.csv"]'


@pytest.mark.parametrize("name", ["link.csv", "folder-link/secret.csv"])
def test_links_of_an_input_that_lead_out(name: str, judge: Judge, place: Place) -> None:
    _denied(judge(place.input / name), place.out / "secret.csv")


@pytest.mark.parametrize("name", ["mine", "hop"])
def test_links_that_a_program_makes_to_hide_what_it_wants(name: str, judge: Judge, place: Place) -> None:
    _denied(judge(place.work / name), place.out / "secret.csv")
    # To write through one is an attempt as well; to remove or replace the link itself is not.
    _denied(judge(place.work / name, writes=True, creates=True), place.out / "secret.csv")
    assert judge(place.work / name, "delete", writes=True, follows=False) is None
    assert judge(place.work / name, "rename", writes=True, follows=False) is None


def test_links_that_stay_inside(judge: Judge, place: Place) -> None:
    assert judge(place.work / "loop") is None
    assert judge(place.work / "dangling") is None
    assert judge(place.work / "dangling", writes=True, creates=True) is None


@pytest.mark.parametrize("prefix", ["/proc/self/root", "/proc/7/root/proc/self/root", "/proc/7/task/8/root"])
def test_the_root_by_way_of_proc(prefix: str, judge: Judge, place: Place) -> None:
    _denied(judge(f"{prefix}{place.out}/secret.csv"), place.out / "secret.csv")


def test_creation_is_judged_by_the_folder(judge: Judge, place: Place) -> None:
    new = {"writes": True, "creates": True}
    assert judge(place.work / "new", **new) is None
    assert judge(place.work / "absent/new", **new) is None
    _denied(judge(place.out / "new", **new), place.out / "new")
    assert judge("/nowhere/new", **new) is None


@pytest.mark.parametrize(
    ("name", "operation", "creates", "event"),
    [
        ("data.csv", "open", False, True),
        ("new.csv", "open", True, True),
        ("absent.csv", "open", False, False),
        ("absent/new.csv", "open", True, False),
        ("data.csv", "delete", False, True),
        ("absent.csv", "delete", False, False),
        ("new", "create", True, True),
        ("data.csv", "create", True, False),  # EEXIST
    ],
)
def test_read_only(name: str, operation: str, creates: bool, event: bool, judge: Judge, place: Place) -> None:
    finding = judge(place.input / name, operation, writes=True, creates=creates)
    assert (finding is not None) == event
    if finding:
        assert (finding.event_class, finding.error, finding.told) == ("read-only", None, "EROFS")


def test_credentials_are_events_even_where_there_are_none(judge: Judge) -> None:
    finding = judge("/home/someone/.ssh/id_rsa")
    _denied(finding, "/home/someone/.ssh/id_rsa", None)
    assert finding
    assert finding.sensitive
    assert finding.told == "ENOENT"
    assert finding.suggestion.startswith("No manifest can allow this")


def test_usual_configuration_is_quiet(judge: Judge) -> None:
    assert os.path.exists("/etc/passwd")
    for path in ("/etc/passwd", "/etc/pip.conf", "/home/someone/.config/matplotlib", "/var/lib/dpkg/status"):
        assert judge(path) is None, path
    # The font library tries to make its cache, first the folder and then the one above it.
    assert os.path.exists("/var")
    for path in ("/var/cache/fontconfig", "/var/cache"):
        assert judge(path, "create", writes=True, creates=True) is None, path


def test_uniform_never_looks_at_the_host(place: Place, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = place.classifier(fd, "uniform")

    def never(path: object) -> bool:
        raise AssertionError(f"the host was asked for {path}")

    monkeypatch.setattr(os.path, "lexists", never)
    for name in ("secret.csv", "absent.csv"):
        _denied(classifier.path("open", f"{place.out}/{name}", writes=False, creates=False), place.out / name)
        raw = struct.pack("=H", socket.AF_UNIX) + os.fsencode(place.out / name)
        _denied(classifier.address(raw), place.out / name)
    assert classifier.path("open", str(place.work / "absent"), writes=False, creates=False) is None


def _inet(host: str, port: int) -> bytes:
    if ":" in host:
        return struct.pack("=H", 10) + struct.pack("!HI", port, 0) + socket.inet_pton(10, host) + bytes(4)
    return struct.pack("=H", 2) + struct.pack("!H", port) + socket.inet_pton(2, host) + bytes(8)


@pytest.mark.parametrize(
    ("host", "port", "target", "sensitive"),
    [
        ("192.0.2.1", 443, "192.0.2.1:443", False),
        ("2001:db8::1", 80, "[2001:db8::1]:80", False),
        ("169.254.169.254", 80, "169.254.169.254:80", True),
        ("::ffff:169.254.169.254", 80, "[::ffff:169.254.169.254]:80", True),
        ("fd00:ec2::254", 80, "[fd00:ec2::254]:80", True),
        ("127.0.0.1", 80, None, False),
        ("127.9.9.9", 80, None, False),
        ("::1", 80, None, False),
        ("0.0.0.0", 80, None, False),
        ("192.0.2.1", 0, None, False),
    ],
)
def test_addresses(host: str, port: int, target: str | None, sensitive: bool, place: Place, fd: int) -> None:
    finding = place.classifier(fd).address(_inet(host, port))
    if target is None:
        assert finding is None
    else:
        assert finding
        assert (finding.event_class, finding.target, finding.error, finding.sensitive) == (
            "network", target, errno.EACCES, sensitive,
        )  # fmt: skip


def test_hostile_names_are_escaped(judge: Judge, place: Place) -> None:
    raw = os.fsencode(place.out) + b"/a\n\x1b[31m\xff\xe2\x80\xae"
    name = os.fsdecode(raw)
    Path(name).write_text("x")
    finding = judge(name)
    assert finding
    assert finding.target == f"{place.out}/a\\x0a\\x1b[31m\\xff\\u202e"
    assert "\n" not in finding.suggestion


@given(data=st.binary(max_size=140))
def test_any_address_is_judged(data: bytes) -> None:
    fd = os.open("/", os.O_PATH)
    try:
        finding = _any_classifier(fd).address(data)
        assert finding is None or finding.error in (None, errno.EACCES)
    finally:
        os.close(fd)


def _any_classifier(fd: int) -> Classifier:
    plan = Plan(
        name="t", baseline=True, notebook=None, workdir="/w", isolation="bubblewrap", workload="generated-code",
        scratch=Scratch(size=1), outputs=None, budgets=BUDGETS, policy="sha256:0",
    )  # fmt: skip
    return Classifier(plan, (Mounted(target="/w", writable=True),), fd, ())


def _query(*labels: bytes) -> bytes:
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return b"\x12\x34\x01\0\0\1\0\0\0\0\0\0" + name + b"\0\1\0\1"


def test_dns_questions() -> None:
    assert dns_question(_query(b"data", b"example", b"com")) == "data.example.com"
    assert dns_question(_query(b"a\n\xff", b"x")) == "a\\x0a\\xff.x"
    assert dns_question(_query(b"a")[:2] + b"\x81" + _query(b"a")[3:]) is None  # an answer
    assert dns_question(_query(b"example")[:16]) is None
    assert dns_question(b"") is None


@given(data=st.binary(max_size=600))
def test_any_packet_is_read(data: bytes) -> None:
    name = dns_question(data)
    assert name is None or name.isprintable()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"/a/b", "/a/b"), (b"//a//b/", "/a/b"), (b"/a/./b/../c", "/a/c"), (b"/../../etc", "/etc"),
        (b"/", "/"), (b"/a/..", "/"), (b"/a/...", "/a/..."), (b"/\xff\n", "/\udcff\n"),
    ],
)  # fmt: skip
def test_absolute_names(raw: bytes, expected: str) -> None:
    assert _absolute(raw, os.getpid(), None) == expected


def test_relative_names(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert _absolute(b"x/../y", os.getpid(), fd) == f"{tmp_path}/y"
        assert _absolute(b"x", os.getpid(), 0xFFFFFF9C) == f"{os.getcwd()}/x"  # AT_FDCWD, zero-extended
        assert _absolute(b"x", os.getpid(), None) == f"{os.getcwd()}/x"
        assert _absolute(b"x", os.getpid(), 0x7FFF) is None
    finally:
        os.close(fd)
    read, write = os.pipe()
    try:
        assert _absolute(b"x", os.getpid(), read) is None
    finally:
        os.close(read)
        os.close(write)

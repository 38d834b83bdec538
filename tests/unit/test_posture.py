"""The posture is what the kernel shows: each lie about a sandbox is noticed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_glovebox import sandbox
from jupyter_glovebox.limits.base import ControlState
from jupyter_glovebox.manifest.plan import Scratch
from jupyter_glovebox.sandbox import landlock, posture
from jupyter_glovebox.sandbox.base import Mounted, Request, Sandbox

from ..escape.box import MIB, make_plan, make_request

CONTROLS = {
    "user", "uid", "capabilities", "pid", "mount", "network", "ipc", "uts", "cgroup_namespace", "seccomp",
    "landlock", "no_new_privileges", "environment", "descriptors", "storage",
}  # fmt: skip


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Sandbox, Request]]:
    """A sandbox whose command waits."""
    request = make_request(["/bin/true"], make_plan(str(tmp_path)), (0, 1, 2))
    box = sandbox.start(request)
    yield box, request
    box.close()


class Liar:
    """A "sandbox" that is this very test process."""

    def __init__(self, mounts: tuple[Mounted, ...]) -> None:
        self.pid = self.init_pid = os.getpid()
        self.listener_fd = 0
        self.landlock_abi = 0
        self.mounts = mounts


def states(measured: dict[str, ControlState]) -> dict[str, str]:
    return {control: state.state for control, state in measured.items()}


def test_every_control_is_enforced(waiting: tuple[Sandbox, Request]) -> None:
    expected = dict.fromkeys(CONTROLS, "enforced")
    if os.getuid() == 0:
        expected["uid"] = "soft"
    if landlock.detect_abi() < landlock.WHOLE_ABI:
        expected["landlock"] = "soft"
    measured = posture.measure(*waiting)
    assert states(measured) == expected, measured
    assert all(state.reason for state in measured.values())
    assert all(bool(state.fix) == (state.state != "enforced") for state in measured.values())


def test_unsandboxed_process_is_seen_through(waiting: tuple[Sandbox, Request]) -> None:
    real, request = waiting
    measured = posture.measure(Liar(real.mounts), request)  # type: ignore[arg-type]
    enforced = {control for control, state in measured.items() if state.state == "enforced"}
    # An ordinary user's uid is an ordinary user's uid, sandboxed or not.
    assert enforced <= {"uid", "no_new_privileges"}


def test_vanished_process_is_off(waiting: tuple[Sandbox, Request]) -> None:
    real, request = waiting
    liar = Liar(real.mounts)
    liar.pid = liar.init_pid = 2**22 + 1
    assert set(states(posture.measure(liar, request)).values()) == {"off"}  # type: ignore[arg-type]


def test_unlisted_writable_place_is_noticed(waiting: tuple[Sandbox, Request]) -> None:
    box, request = waiting
    box.mounts = tuple(m for m in box.mounts if m.target != "/run/kernel")
    assert posture.measure(box, request)["mount"].state == "off"


def test_inherited_descriptor_is_noticed(waiting: tuple[Sandbox, Request]) -> None:
    real, request = waiting
    read, write = os.pipe()
    os.set_inheritable(write, True)
    liar = Liar(real.mounts)
    assert "would be inherited" in posture.measure(liar, request)["descriptors"].reason  # type: ignore[arg-type]
    os.close(read)
    os.close(write)


def test_disk_scratch_is_soft(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "work").mkdir()
    plan = make_plan(str(tmp_path / "work"), scratch=Scratch(size=MIB, on="disk"))
    request = make_request(["/bin/true"], plan, (0, 1, 2), disk_scratch=str(tmp_path / "disk"))
    box = sandbox.start(request)
    assert posture.measure(box, request)["storage"].state == "soft"
    box.close()


def test_it_is_cheap(waiting: tuple[Sandbox, Request]) -> None:
    took = []
    for _ in range(7):
        begin = time.process_time()
        posture.measure(*waiting)
        took.append(time.process_time() - begin)
    assert min(took) < 0.02

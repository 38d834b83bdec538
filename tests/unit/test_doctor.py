"""The doctor tells what is, and names the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jupyter_glovebox.sandbox import bubblewrap, doctor

# What bubblewrap 0.8 to 0.11 prints when the system forbids something.
LAST_WORDS = {
    "user": ("--unshare-user", "bwrap: setting up uid map: Permission denied", "namespace"),
    "pid": ("--unshare-pid", "bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "/proc"),
    "network": ("--unshare-net", "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "network"),
    "capabilities": ("--disable-userns", "bwrap: Unknown option --disable-userns", "0.8"),
}


def _fake(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _use(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(bubblewrap, "BWRAP_CANDIDATES", (program,))
    monkeypatch.setattr("sys.path", [])


def test_probe_measures_a_real_sandbox() -> None:
    states = doctor.probe()
    assert tuple(states) == doctor.CONTROLS
    for name in (
        "user",
        "capabilities",
        "pid",
        "mount",
        "network",
        "ipc",
        "uts",
        "seccomp",
        "no_new_privileges",
    ):
        assert states[name].state == "enforced", (name, states[name])
    for state in states.values():
        assert state.reason
        assert state.state == "enforced" or state.fix
    assert (states["uid"].state == "soft") == (os.getuid() == 0)


def test_probe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(os.listdir("/proc/self/fd"))
    doctor.probe()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


def test_without_bubblewrap_every_control_is_off_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _use(monkeypatch, str(tmp_path / "absent"))
    states = doctor.probe()
    assert {state.state for state in states.values()} == {"off"}
    assert all("install bubblewrap" in state.fix for state in states.values())
    assert doctor.versions()["bubblewrap"].state == "off"


def test_a_setuid_bubblewrap_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = _fake(tmp_path / "bwrap", "exit 0")
    os.chmod(program, 0o4755)
    _use(monkeypatch, program)
    assert "chmod u-s" in doctor.probe()["user"].fix
    assert "chmod u-s" in doctor.versions()["bubblewrap"].fix


@pytest.mark.parametrize("control", list(LAST_WORDS))
def test_the_control_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, control: str
) -> None:
    option, words, expected = LAST_WORDS[control]
    # Real bubblewrap parses --args FD; this one fails on it too, as the real one would.
    script = f"case \" $* \" in *' --args '*|*' {option} '*) echo \"{words}\" >&2; exit 1;; esac\nexit 0"
    _use(monkeypatch, _fake(tmp_path / "bwrap", script))
    states = doctor.probe()
    assert {state.state for state in states.values()} == {"off"}
    assert expected in states[control].reason
    assert "no sandbox can be started" not in states[control].reason
    others = [state for name, state in states.items() if name != control]
    assert all("no sandbox can be started" in state.reason for state in others)
    assert all(state.fix for state in states.values())


@pytest.mark.parametrize(
    ("file", "value", "expected"),
    [("kernel/apparmor_restrict_unprivileged_userns", "1", "bwrap-userns-restrict"),
     ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
     ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000")],
)  # fmt: skip
def test_the_fix_is_that_of_the_setting_seen(
    monkeypatch: pytest.MonkeyPatch, file: str, value: str, expected: str
) -> None:
    from jupyter_glovebox.sandbox.base import SandboxError

    real = doctor._read
    error = SandboxError("user-namespace", "no", "general advice")
    if real(f"/proc/sys/{file}") != value:
        assert expected not in doctor._fix(error), "the control: not advised where it does not hold"
    monkeypatch.setattr(doctor, "_read", lambda path: value if path.endswith(file) else real(path))
    assert expected in doctor._fix(error)


def test_versions_of_this_machine() -> None:
    found = doctor.versions()
    assert set(found) == {"kernel", "bubblewrap"}
    assert found["bubblewrap"].state == "enforced"


@pytest.mark.parametrize(
    ("release", "build", "state"),
    [("6.18.44", "", "enforced"), ("6.1.0-18-amd64", "#1 SMP Debian 6.1.76-1 (2024-02-01)", "enforced"),
     ("6.1.0-9-amd64", "#1 SMP Debian 6.1.27-1 (2023-05-08)", "soft"), ("6.1.0-9-amd64", "", "soft"),
     ("5.15.24", "", "soft"), ("5.15.25", "", "enforced"), ("5.10.102", "", "enforced"), ("5.14.0", "", "soft"),
     ("6.2.0", "", "soft"), ("6.4.1", "", "enforced"), ("5.9.1", "", "off"), ("4.18.0-553", "", "off"),
     ("unknown", "", "soft")],
)  # fmt: skip
def test_kernels(release: str, build: str, state: str) -> None:
    found = doctor._kernel(release, build)
    assert found.state == state
    assert state == "enforced" or found.fix


@pytest.mark.parametrize(
    ("version", "state"), [("0.8.0", "enforced"), ("0.11.2", "enforced"), ("0.7.0", "off")]
)
def test_bubblewraps(tmp_path: Path, version: str, state: str) -> None:
    assert doctor._bubblewrap(_fake(tmp_path / "bwrap", f"echo bubblewrap {version}")).state == state

"""What is never mounted, whoever asks: each rule with a plan that it alone refuses."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.manifest.plan import Budgets, InputGrant, Outputs, Scratch
from jupyter_glovebox.sandbox import filesystems, validation
from jupyter_glovebox.sandbox.base import Bind, Environment, SandboxError
from jupyter_glovebox.sandbox.validation import validate

from .hostbox import grant, make_plan

NOTHING = Environment(binds=())
BUDGETS = {
    "memory": 1 << 30, "cpus": 1.0, "cpu_time": 60.0, "wall_time": 60.0, "processes": 64, "open_files": 256,
    "display": 1 << 20,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / "ada"
    (folder / "project").mkdir(parents=True)
    (folder / "project/data.csv").write_text("a,b\n")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def refused(
    *inputs: InputGrant, environment: Environment = NOTHING, private: tuple[str, ...] = (), **changes: Any
) -> str:
    """The refusal's whole text; the plan without the changes is accepted."""
    validate(make_plan(), NOTHING, private_dirs=private)
    with pytest.raises(SandboxError) as raised:
        validate(make_plan(inputs=inputs, **changes), environment, private_dirs=private)
    assert raised.value.stage == "validation"
    return str(raised.value)


def accepted(*inputs: InputGrant, environment: Environment = NOTHING, **changes: Any) -> None:
    validate(make_plan(inputs=inputs, **changes), environment, private_dirs=())


def outputs(path: str) -> Outputs:
    return Outputs(path=path, max_files=1, max_file_size=1, max_total_size=1, types=("csv",))


# -- what honest plans need -------------------------------------------------------------------------


def test_files_and_folders_below_a_home_are_accepted(home: Path) -> None:
    accepted(grant(home / "project/data.csv"), workdir=str(home / "project"))
    accepted(grant(home / "project"), outputs=outputs("results"))


def test_a_notebook_in_the_home_itself_is_accepted(home: Path) -> None:
    accepted(grant(home / "project/data.csv"), workdir=str(home), outputs=outputs("out"))


def test_an_approved_link_is_accepted(home: Path) -> None:
    (home / "project/link.csv").symlink_to("data.csv")
    accepted(grant(home / "project/link.csv"))


def test_a_file_of_etc_for_everybody_is_accepted() -> None:
    accepted(grant("/etc/hostname"))


def test_a_folder_with_links_and_many_files_is_accepted(home: Path) -> None:
    folder = home / "project/many"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.csv").touch()
    (folder / "out").symlink_to("/etc/shadow")  # leads nowhere inside
    accepted(grant(folder))


# -- whole places -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/home", "/etc", "/usr", "/var", "/tmp", "/var/tmp", "/root"])
def test_whole_places_are_refused(path: str) -> None:
    text = refused(grant(path))
    assert "all of" in text or "whole home" in text


@pytest.mark.parametrize(
    "path", ["/proc/self/environ", "/proc", "/sys/kernel", "/dev/null", "/run", "/dev/shm"]
)
def test_places_of_the_kernel_and_of_services_are_refused(path: str) -> None:
    assert "never mounted" in refused(grant(path)) or "sandbox's own" in refused(grant(path))


def test_a_link_into_run_is_refused_by_its_real_path(home: Path) -> None:
    (home / "project/r").symlink_to("/run")
    assert "/run" in refused(grant(home / "project/r"))


def test_a_home_is_refused_by_every_name(home: Path, tmp_path: Path) -> None:
    assert "whole home folder" in refused(grant(home))
    (tmp_path / "alias").symlink_to(home)
    assert "whole home folder" in refused(grant(tmp_path / "alias"))
    assert "holds the home" in refused(grant(tmp_path / "home"))


# -- credentials ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [".ssh/id_ed25519", ".aws/credentials", ".config/gcloud/x.db", ".kube/config", ".netrc", ".gnupg/x",
     ".docker/config.json", ".pypirc", ".npmrc", ".git-credentials", ".mozilla/firefox/p/logins.json",
     ".local/share/keyrings/login.keyring", ".password-store/a.gpg", ".jupyter/jupyter_server_config.json",
     ".local/share/jupyter/runtime/kernel-1.json", ".bash_history", ".ipython/profile_default/history.sqlite",
     ".azure/token", ".config/google-chrome/Default/Cookies", "project/id_rsa"],
)  # fmt: skip
def test_credential_places_are_refused(home: Path, name: str) -> None:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    assert "no manifest can allow it" in refused(grant(path))
    if path.parent != home:
        text = refused(grant(path.parent))
        assert "no manifest can allow it" in text or "holds" in text


def test_a_folder_that_holds_credentials_is_refused(home: Path) -> None:
    (home / ".config/gcloud").mkdir(parents=True)
    assert "holds cloud credentials" in refused(grant(home / ".config"))


def test_files_of_the_system_for_few_are_refused(tmp_path: Path) -> None:
    assert "password hashes" in refused(grant("/etc/shadow"))
    private = [f"/etc/{name}" for name in os.listdir("/etc") if os.path.isfile(f"/etc/{name}")]
    private = [path for path in private if not os.stat(path).st_mode & 0o004 and "shadow" not in path]
    for path in private:
        assert "not everybody" in refused(grant(path)) or "no manifest" in refused(grant(path))


def test_our_own_folders_are_refused_with_what_is_around(home: Path) -> None:
    state = home / "project/state"
    (state / "sub").mkdir(parents=True)
    for path in (state, state / "sub", state.parent):
        assert "private folder" in refused(grant(path), private=(str(state),))
    assert "this program's own" in refused(private=(str(state),), workdir=str(state / "sub"))


def test_the_servers_runtime_folder_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = home / "project/rt"
    runtime.mkdir()
    accepted(grant(runtime))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
    assert "private folder" in refused(grant(runtime))


def test_policy_forbids_more(home: Path) -> None:
    accepted(grant(home / "project"))
    for forbidden in (home / "project", home / "project/data.csv", home):
        text = refused(grant(home / "project"), forbidden_mounts=(str(forbidden),))
        assert "forbidden by policy" in text


# -- sockets, devices, pipes ------------------------------------------------------------------------


def test_a_socket_is_refused_alone_and_in_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = home / "project/a/b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    accepted(grant(home / "project"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        assert "a socket" in refused(grant(deep / "s"))
        text = refused(grant(home / "project"))
    assert "a socket" in text
    assert "a/b/s" in text


def test_a_pipe_is_refused_alone_and_in_a_folder(home: Path) -> None:
    accepted(grant(home / "project"))
    os.mkfifo(home / "project/p")
    assert "a pipe" in refused(grant(home / "project/p"))
    assert "a pipe" in refused(grant(home / "project"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes device nodes")
def test_a_device_outside_dev_is_refused(home: Path) -> None:
    os.mknod(home / "project/d", 0o600 | 0o020000, os.makedev(1, 3))
    assert "a device" in refused(grant(home / "project/d"))
    assert "a device" in refused(grant(home / "project"))


def test_keys_inside_a_granted_folder_are_found(home: Path) -> None:
    (home / "project/sub").mkdir()
    accepted(grant(home / "project"))
    (home / "project/sub/id_ed25519").write_text("x")
    assert "a key or token" in refused(grant(home / "project"))


def test_a_folder_too_large_to_be_checked_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (home / f"project/{number}").touch()
    accepted(grant(home / "project"))
    monkeypatch.setattr(validation, "MOST_ENTRIES", 20)
    assert "too much to be checked" in refused(grant(home / "project"))


def test_names_in_a_refusal_are_escaped(home: Path) -> None:
    os.mkfifo(home / "project/\x1b[31mred\n")
    text = refused(grant(home / "project"))
    assert "\x1b" not in text
    assert "red\\x0a" in text


# -- what changed since the approval ----------------------------------------------------------------


def test_a_missing_input_is_refused(home: Path) -> None:
    assert "cannot be found" in refused(grant(home / "project/gone"))


def test_a_source_that_became_a_link_is_refused(home: Path) -> None:
    target = home / "project/data.csv"
    approved = grant(target)
    accepted(approved)
    target.rename(home / "project/moved.csv")
    target.symlink_to("moved.csv")
    assert "leads to" in refused(approved)


def test_a_link_that_leads_elsewhere_now_is_refused(home: Path) -> None:
    (home / "project/other.csv").write_text("x")
    link = home / "project/link.csv"
    link.symlink_to("data.csv")
    approved = grant(link)
    accepted(approved)
    link.unlink()
    link.symlink_to("other.csv")
    assert "not to the approved" in refused(approved)


# -- plans that no compiler has seen ----------------------------------------------------------------


@pytest.mark.parametrize("path", ["relative.csv", "/srv/../etc/hostname", "//srv/x", "/srv/x/", "/a\0b", ""])
def test_names_that_are_not_plain_are_refused(path: str) -> None:
    assert "not a plain absolute name" in refused(grant(path, "/etc/hostname"))
    assert "not a plain absolute name" in refused(grant("/etc/hostname", path))


@pytest.mark.parametrize(
    "workdir",
    ["/", "relative", "/srv/..", "/srv/a/../b", "/etc/x", "/usr/share", "/proc/1", "/run/u", "/dev/shm", ""],
)
def test_working_folders_of_the_system_are_refused(workdir: str) -> None:
    assert "working folder" in refused(workdir=workdir)


def test_a_working_folder_among_credentials_is_refused(home: Path) -> None:
    assert "private keys" in refused(workdir=str(home / ".ssh"))


@pytest.mark.parametrize("path", ["..", "../x", "/abs", "a/../../x", "a//b", "a/", "", "a/../b", "x\0"])
def test_outputs_that_leave_the_working_folder_are_refused(path: str) -> None:
    assert "outputs folder" in refused(outputs=outputs(path))


@pytest.mark.parametrize("path", [".", "out", "a/b"])
def test_plain_outputs_are_accepted(path: str) -> None:
    accepted(outputs=outputs(path))


def test_an_input_in_the_outputs_is_refused(home: Path) -> None:
    (home / "project/out").mkdir()
    (home / "project/out/old.csv").write_text("x")
    text = refused(grant(home / "project/out/old.csv"), workdir=str(home / "project"), outputs=outputs("out"))
    assert "lies in the outputs folder" in text


def test_two_inputs_at_one_name_are_refused(home: Path) -> None:
    (home / "project/b.csv").write_text("x")
    twice = InputGrant(path=str(home / "project/data.csv"), source=str(home / "project/b.csv"), kind="file")
    assert "Two inputs" in refused(grant(home / "project/data.csv"), twice)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH", "HOME", "JPY_PARENT_PID", "A=B", "", "1X", "A\0"])
def test_variables_of_the_sandbox_are_refused(name: str) -> None:
    validate(make_plan(environment={"MODE": "x"}), NOTHING, private_dirs=())
    with pytest.raises(SandboxError, match="variable"):
        validate(make_plan(environment={name: "x"}), NOTHING, private_dirs=())


@pytest.mark.parametrize("name", ["memory", "cpus", "cpu_time", "wall_time", "processes", "open_files"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_budgets_that_limit_nothing_are_refused(name: str, value: float) -> None:
    assert f"budget {name}" in refused(budgets=Budgets(**(BUDGETS | {name: value})))  # type: ignore[arg-type]


def test_a_scratch_without_size_is_refused() -> None:
    assert "scratch size" in refused(scratch=Scratch(size=0))


def test_every_violation_is_told(home: Path) -> None:
    text = refused(grant("/etc/shadow"), grant(home), workdir="/")
    assert text.startswith("3 rules refuse this launch:")
    assert all(word in text for word in ("password hashes", "whole home", "working folder"))


# -- the environment's binds ------------------------------------------------------------------------


def _environment(source: str, target: str | None = None) -> Environment:
    return Environment(binds=(Bind(source=source, target=target or source),))


def test_environment_binds_are_held_to_the_same_rules(home: Path) -> None:
    (home / "v").mkdir()
    (home / ".ssh").mkdir()
    (home / "l").symlink_to(home / "v")
    accepted(environment=_environment(str(home / "v")))
    assert "whole home" in refused(environment=_environment(str(home)))
    assert "private keys" in refused(environment=_environment(str(home / ".ssh")))
    assert "through a link" in refused(environment=_environment(str(home / "l")))
    assert "cannot be found" in refused(environment=_environment(str(home / "gone")))
    assert "/run" in refused(environment=_environment("/run"))


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/usr/lib", "/proc/x", "/run/glovebox/x", "relative", "/bin/sh"]
)
def test_an_environment_cannot_take_the_systems_names(home: Path, target: str) -> None:
    (home / "v").mkdir()
    assert refused(environment=_environment(str(home / "v"), target))
    assert refused(environment=Environment(binds=(), links=(("x", target),)))


def test_an_environment_cannot_cover_the_working_folder(home: Path) -> None:
    (home / "v/notebooks").mkdir(parents=True)
    environment = _environment(str(home / "v"))
    accepted(environment=environment, workdir=str(home / "elsewhere"))
    assert "working folder" in refused(environment=environment, workdir=str(home / "v/notebooks"))
    assert "working folder" in refused(environment=environment, workdir=str(home / "v"))


# -- file systems -----------------------------------------------------------------------------------


def test_file_systems_are_told_apart() -> None:
    table = [
        ("/", "ext4"),
        ("/data", "xfs"),
        ("/data/remote", "fuse.sshfs"),
        ("/database", "tmpfs"),
        ("/c", "cgroup2"),
    ]
    assert filesystems.seen_from("/data/x", table) == [("/data", "xfs")]
    assert filesystems.seen_from("/data", table) == [("/data", "xfs"), ("/data/remote", "fuse.sshfs")]
    assert filesystems.seen_from("/home", table) == [("/", "ext4")]
    assert filesystems.why_never("cgroup2")
    assert filesystems.why_never("fuse.sshfs")
    for kind in ("ext4", "nfs4", "fuseblk", "overlay", "9p", "virtiofs", "tmpfs"):
        assert filesystems.why_never(kind) is None


def test_a_remote_file_system_below_an_input_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted(grant(home / "project"))
    real = filesystems.mounts()
    monkeypatch.setattr(filesystems, "mounts", lambda: [*real, (str(home / "project/cloud"), "fuse.rclone")])
    assert "another program answers" in refused(grant(home / "project"))


def test_the_mount_table_is_read() -> None:
    assert dict(filesystems.mounts())["/proc"] == "proc"

"""Bad input: a clear error and exit code each, nothing left behind, never an unsandboxed kernel."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_glovebox.cli import main
from jupyter_glovebox.ledger.store import Ledger
from jupyter_glovebox.locations import runtime_dir, state_dir

SPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}
BASIC = "version: 1\nname: t\n"


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A notebook whose cell leaves a mark outside when it ever runs unsandboxed."""
    work = tmp_path / "work"
    work.mkdir()
    mark = tmp_path / "ran-unsandboxed"
    cell = f"open({str(mark)!r}, 'w').close()"
    return _write(work / "nb.ipynb", [f"try:\n    {cell}\nexcept OSError: pass", "1 + 1"])


def _write(path: Path, cells: list[str]) -> Path:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata={"kernelspec": SPEC}
    )
    nbformat.write(notebook, path)
    return path


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> object:
    yield
    assert not (tmp_path / "ran-unsandboxed").exists()
    assert list(runtime_dir().iterdir()) == []


def _run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_mark_works_outside(notebook: Path, tmp_path: Path) -> None:
    """Positive control: without a sandbox the cell does leave its mark."""
    code = nbformat.read(notebook, 4).cells[0].source
    subprocess.run([sys.executable, "-c", code], check=True)
    mark = tmp_path / "ran-unsandboxed"
    assert mark.exists()
    mark.unlink()


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "json", "fifo"])
def test_notebook(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nb.ipynb"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_bytes(b"\xff\xfe no notebook")
    elif kind == "json":
        path.write_text('{"a": 1}')
    elif kind == "fifo":
        os.mkfifo(path)
    code, _, err = _run(capsys, "run", path)
    assert code == 2
    assert "nb.ipynb" in err


def _bomb() -> str:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(levels)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("missing", ""),
        ("folder", ""),
        ("binary", ""),
        ("10MB", ""),
        ("bomb", ":1:"),
        ("unknown-key", ":3:"),
        ("unit", ":3:"),
        ("fifo", ""),
    ],
)
def test_manifest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, notebook: Path, kind: str, place: str
) -> None:
    path = tmp_path / "m.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(bytes(range(256)) * 10)
    elif kind == "10MB":
        path.write_text(BASIC + "#" * (10 << 20))
    elif kind == "bomb":
        path.write_text(_bomb())
    elif kind == "unknown-key":
        path.write_text(BASIC + "imputs: [a.csv]\n")
    elif kind == "unit":
        path.write_text(BASIC + "scratch: {size: 5 parsecs}\n")
    elif kind == "fifo":
        os.mkfifo(path)
    code, _, err = _run(capsys, "run", notebook, "--manifest", path)
    assert code == 2
    assert "m.yaml" in err
    assert place in err
    if kind == "unknown-key":
        assert "inputs" in err, "the nearest match is named"


def test_input_that_does_not_exist(capsys: pytest.CaptureFixture[str], notebook: Path) -> None:
    manifest = notebook.with_name("m.yaml")
    manifest.write_text(BASIC + "inputs: [nothing.csv]\n")
    code, _, err = _run(capsys, "run", notebook, "--manifest", manifest)
    assert code in (1, 2)
    assert "nothing.csv" in err


def test_input_that_is_a_link_to_a_secret(
    capsys: pytest.CaptureFixture[str], notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws/credentials").write_text("[default]\naws_secret_access_key = x\n")
    monkeypatch.setenv("HOME", str(home))
    (notebook.parent / "data.csv").symlink_to(home / ".aws/credentials")
    manifest = notebook.with_name("m.yaml")
    manifest.write_text(BASIC + "inputs: [data.csv]\n")
    code, _, err = _run(capsys, "run", notebook, "--manifest", manifest)
    assert code in (1, 3)
    assert "credentials" in err


def test_input_that_is_a_socket(capsys: pytest.CaptureFixture[str], notebook: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(notebook.parent)
        listener.bind("docker.sock")
        manifest = notebook.with_name("m.yaml")
        manifest.write_text(BASIC + "inputs: [docker.sock]\n")
        code, _, err = _run(capsys, "run", notebook, "--manifest", manifest)
    assert code in (1, 2, 3)
    assert "docker.sock" in err


def test_manifest_that_changed_after_its_approval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = _write(tmp_path / "nb.ipynb", ["print(open('data.csv').read())"])
    (tmp_path / "data.csv").write_text("hello")
    manifest = tmp_path / "nb.glovebox.yaml"
    manifest.write_text(BASIC + "inputs: [data.csv]\n")
    assert _run(capsys, "approve", path, "--yes")[0] == 0
    assert _run(capsys, "run", path)[0] == 0
    manifest.write_text(BASIC + "inputs: [data.csv]\nscratch: {size: 1M}\n")
    code, out, err = _run(capsys, "run", path, "--json")
    assert code == 1
    assert "approve" in err
    result = json.loads(out)
    assert result["status"] == "error"
    assert [e["class"] for e in result["blocked"]] == ["not-granted"]


def test_input_link_that_moved_after_the_approval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = _write(tmp_path / "nb.ipynb", ["print(open('data.csv').read())"])
    (tmp_path / "one.csv").write_text("one")
    (tmp_path / "two.csv").write_text("two")
    link = tmp_path / "data.csv"
    link.symlink_to("one.csv")
    (tmp_path / "nb.glovebox.yaml").write_text(BASIC + "inputs: [data.csv]\n")
    assert _run(capsys, "approve", path, "--yes")[0] == 0
    assert _run(capsys, "run", path)[0] == 0
    link.unlink()
    link.symlink_to("two.csv")
    code, _, err = _run(capsys, "run", path)
    assert code == 1
    assert "data.csv" in err


def test_pinned_input_that_changed(capsys: pytest.CaptureFixture[str], notebook: Path) -> None:
    (notebook.parent / "data.csv").write_text("changed")
    manifest = notebook.with_name("m.yaml")
    manifest.write_text(BASIC + f"inputs: [{{path: data.csv, sha256: {'0' * 64}}}]\n")
    code, _, err = _run(capsys, "run", notebook, "--manifest", manifest)
    assert code in (1, 3)
    assert "data.csv" in err


def test_outputs_on_a_full_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The kernel's result stays reported, and nothing half-written lies in the folder."""
    if os.getuid() != 0:
        pytest.skip("mounting a full file system needs root")
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)], check=True)
    try:
        path = _write(tmp_path / "nb.ipynb", ["open('outputs/a.txt', 'w').write('x' * 500_000)"])
        manifest = tmp_path / "m.yaml"
        manifest.write_text(BASIC + "outputs: {types: [txt]}\n")
        code, out, _ = _run(capsys, "run", path, "--manifest", manifest, "--export", full / "x", "--json")
        result = json.loads(out)
        assert code == 1
        (artifact,) = result["artifacts"]
        assert artifact["exported_to"] is None
        assert "space" in json.dumps(artifact["reasons"]).lower()
        assert [p for p in full.rglob("*") if p.is_file()] == []
        assert any(e["class"] == "left-behind" for e in result["blocked"])
    finally:
        subprocess.run(["umount", str(full)], check=True)


REMEDIES = {
    "user-namespace": "AppArmor",
    "mount": "container",
    "proc": "unmasked /proc",
    "network": "AppArmor",
    "seccomp": "Linux 5.10",
}
FAILURES = {
    "user-namespace": "bwrap: setting up uid map: Permission denied",
    "mount": "bwrap: Failed to make / slave: Permission denied",
    "proc": "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
    "network": "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
    "seccomp": "bwrap: prctl(PR_SET_SECCOMP): Invalid argument",
}


@pytest.mark.parametrize("stage", FAILURES)
def test_bubblewrap_that_fails(
    capsys: pytest.CaptureFixture[str],
    notebook: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\necho "{FAILURES[stage]}" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr("jupyter_glovebox.supervisor.process._BOOTSTRAP", _patched(fake))
    code, _, err = _run(capsys, "run", notebook)
    assert code == 3, err
    assert REMEDIES[stage] in err
    (record,) = _records()
    assert record.closed_by == "failed-launch"


@pytest.mark.parametrize("kind", ["missing", "setuid"])
def test_bubblewrap_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str],
    notebook: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    program = tmp_path / "bwrap"
    if kind == "setuid":
        program.write_bytes(Path("/usr/bin/bwrap").read_bytes())
        program.chmod(0o755 | stat.S_ISUID)
    monkeypatch.setattr("jupyter_glovebox.supervisor.process._BOOTSTRAP", _patched(program))
    code, _, err = _run(capsys, "run", notebook)
    assert code == 3, err
    assert kind in err or "apt" in err


def _patched(program: Path) -> str:
    """The supervisor's first lines, with another bwrap: the real supervisor meets a bwrap that fails."""
    return (
        "import jupyter_glovebox.sandbox.bubblewrap as b; "
        f"b.BWRAP_CANDIDATES = ({str(program)!r},)\n"
        "from jupyter_glovebox.supervisor.main import main; main()"
    )


def _records() -> list[object]:
    ledger = Ledger(str(state_dir() / "ledger.sqlite3"))
    try:
        return list(ledger.usage())
    finally:
        ledger.close()


def test_unknown_kernel(capsys: pytest.CaptureFixture[str], notebook: Path) -> None:
    code, _, err = _run(capsys, "run", notebook, "--kernel", "no-such-kernel")
    assert code == 2
    assert "kernelspec" in err

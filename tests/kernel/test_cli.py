"""The commands, as a person and as a program use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_glovebox.cli import main

SPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def _notebook(path: Path, *cells: str) -> Path:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata={"kernelspec": SPEC}
    )
    nbformat.write(notebook, path)
    return path


def _glovebox(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_glovebox", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, **options)


def _json(*arguments: str | Path, code: int = 0) -> Any:
    done = _glovebox(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_whole_story(folder: Path) -> None:
    """Draft, approve, run, see what was blocked and what came out, revoke."""
    (folder / "data.csv").write_text("a,b\n1,2\n")
    notebook = _notebook(
        folder / "job.ipynb",
        "rows = open('data.csv').read()",
        "open('outputs/result.csv', 'w').write(rows)",
        "try:\n    open('/etc/shadow').read()\nexcept OSError as error:\n    print(type(error).__name__)",
    )
    drafted = _json("init", notebook)
    assert "data.csv" in drafted["text"]
    assert _glovebox("check", drafted["manifest"]).returncode == 0
    assert "data.csv" in _glovebox("explain", notebook, "--manifest", drafted["manifest"]).stdout
    assert _json("approve", notebook, "--yes")["manifest"].startswith("sha256:")
    result = _json("run", notebook, "--output", folder / "done.ipynb")
    assert result["status"] == "completed"
    (artifact,) = result["artifacts"]
    assert artifact["verdict"] == "allow"
    assert Path(artifact["exported_to"]).read_text() == "a,b\n1,2\n"
    (event,) = result["blocked"]
    assert event["target"] == "/etc/shadow"
    assert event["cell"]["index"] == 2
    assert event["cell"]["execution_count"] == 3
    assert event["process"]["comm"].startswith("python")
    done = nbformat.read(folder / "done.ipynb", 4)
    assert done.cells[2].outputs[0].text == "PermissionError\n"
    assert set(result["cleanup"]) == {"processes", "cgroup", "credentials", "storage", "sockets"}
    listed = _json("events", "--notebook", notebook)
    assert [e["seq"] for e in listed["events"]] == [event["seq"]]
    (record,) = _json("usage", "--notebook", notebook)["records"]
    assert record["cpu_seconds"] > 0
    assert record["plan"] == result["plan"]
    assert _json("events", "--verify")["chain_broken_at"] is None
    assert _json("revoke", notebook)["revoked"] is True
    assert _json("run", notebook, code=1)["status"] == "error"


def test_strict_makes_a_blocked_access_an_error(folder: Path) -> None:
    notebook = _notebook(folder / "n.ipynb", "try: open('/etc/shadow')\nexcept OSError: pass")
    assert _glovebox("run", notebook).returncode == 0
    assert _glovebox("run", notebook, "--strict").returncode == 1


def test_a_cell_that_raises(folder: Path) -> None:
    notebook = _notebook(folder / "n.ipynb", "1 / 0", "2")
    result = _json("run", notebook, code=1)
    assert result["status"] == "error"
    assert result["reason"].startswith("cell [1]: ZeroDivisionError")


def test_what_cannot_be_written_or_meant_is_said_before_the_run(folder: Path) -> None:
    notebook = _notebook(folder / "n.ipynb", "1")
    done = _glovebox("run", notebook, "--output", folder / "missing" / "done.ipynb")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert _glovebox("run", notebook, "--timeout", "0").returncode == 2
    assert _glovebox("usage", "--limit", "-1").returncode == 2
    assert "No kernel has ended yet." in _glovebox("usage").stdout


def test_a_budget_says_what_to_do(folder: Path) -> None:
    notebook = _notebook(folder / "n.ipynb", "b = b'x' * (2 << 30)")
    (folder / "m.yaml").write_text("version: 1\nname: t\nbudgets: {memory: 300M}\n")
    done = _glovebox("run", notebook, "--manifest", "m.yaml")
    assert done.returncode == 1
    assert "raise that budget in the manifest" in done.stdout
    assert "limit: memory budget of 300" in done.stdout


def test_results_without_outputs_are_told_what_to_add(folder: Path) -> None:
    (folder / "outputs").mkdir()
    notebook = _notebook(folder / "n.ipynb", "open('outputs/a.csv', 'w')")
    (event,) = _json("run", notebook, code=1)["blocked"]
    assert event["suggestion"] == 'outputs: {path: "outputs"}'


def test_exec_says_what_became_of_its_files(folder: Path) -> None:
    (folder / "m.yaml").write_text("version: 1\nname: t\noutputs: {path: outputs, types: [txt]}\n")
    done = _glovebox("exec", "--manifest", "m.yaml", "--", "sh", "-c", "echo done > outputs/o.txt")
    assert "allow      o.txt" in done.stderr
    assert str(folder / "outputs" / "o.txt") in done.stderr
    assert "outside a cell" not in done.stderr


def test_exec_passes_streams_and_status(folder: Path) -> None:
    done = _glovebox("exec", "--", "sh", "-c", "cat; echo err >&2; exit 7", input="hello\n")
    assert (done.returncode, done.stdout) == (7, "hello\n")
    assert done.stderr.startswith("err\n")
    assert _glovebox("exec", "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert _glovebox("exec", "--", "no-such-command").returncode == 127
    assert _glovebox("exec").returncode == 122


def test_exec_with_a_manifest(folder: Path) -> None:
    (folder / "in.txt").write_text("in")
    (folder / "other.txt").write_text("other")
    (folder / "m.yaml").write_text("version: 1\nname: t\ninputs: [in.txt]\noutputs: {types: [txt]}\n")
    result = json.loads(
        _glovebox(
            "exec", "--json", "--manifest", "m.yaml", "--export", "out", "--",
            "sh", "-c", "cat in.txt; cat other.txt; echo done > outputs/o.txt",
        ).stdout
    )  # fmt: skip
    assert result["stdout"] == "in"
    assert "denied" in result["stderr"]
    assert [e["target"] for e in result["blocked"]] == [str(folder / "other.txt")]
    assert (folder / "out/o.txt").read_text() == "done\n"
    (folder / "m.yaml").write_text("version: 1\nnam: t\n")
    assert _glovebox("exec", "--manifest", "m.yaml", "--", "true").returncode == 122


def test_exec_budget(folder: Path) -> None:
    (folder / "m.yaml").write_text("version: 1\nname: t\nbudgets: {wall_time: 2s}\n")
    done = _glovebox("exec", "--manifest", "m.yaml", "--", "sleep", "60")
    assert done.returncode == 121
    assert "wall" in done.stderr


def test_ps_sees_a_running_command(folder: Path) -> None:
    command = [sys.executable, "-m", "jupyter_glovebox", "exec", "--", "sh", "-c", "echo up; sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        (kernel,) = _json("ps")["kernels"]
        assert kernel["alive"]
        assert kernel["isolation"] == "bubblewrap"
        assert kernel["posture"]["network"]["state"] == "enforced"
        process.terminate()
    assert process.returncode == 128 + 15
    assert _json("ps")["kernels"] == []


def test_doctor() -> None:
    result = _json("doctor")
    assert result["isolation"] == "bubblewrap"
    for name in ("mount", "network", "seccomp", "capabilities"):
        assert result["controls"][name]["state"] == "enforced"


def test_check_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.yaml").write_text("version: 1\nname: x\nimputs: []\nbudgets:\n  memory: lots\n")
    assert main(["check", "bad.yaml"]) == 2
    out = capsys.readouterr().out
    assert "bad.yaml:3:1:" in out
    assert "bad.yaml:5:" in out
    assert "inputs" in out
    result = _json("check", "bad.yaml", code=2)
    assert [e["line"] for e in result["files"][0]["errors"]] == [3, 5]


def test_verify(folder: Path) -> None:
    (folder / "good.csv").write_text("a\n1\n")
    (folder / "bad.csv").write_bytes(b"\x7fELF" + bytes(100))
    result = _json("verify", "good.csv", "bad.csv", code=1)
    assert [(f["path"], f["verdict"]) for f in result["files"]] == [
        ("good.csv", "allow"),
        ("bad.csv", "reject"),
    ]


def test_shell_needs_a_terminal_and_works_in_one(folder: Path) -> None:
    notebook = _notebook(folder / "n.ipynb", "1")
    done = _glovebox("shell", notebook, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    import pty

    master, slave = pty.openpty()
    command = [sys.executable, "-m", "jupyter_glovebox", "shell", str(notebook)]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True):
        os.close(slave)
        os.write(master, b"echo $((40 + 2))-here; ls -A ~; cat /etc/shadow; exit\n")
        seen = b""
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:
                break
            seen += data
            if not data:
                break
    os.close(master)
    assert b"42-here" in seen, seen
    assert b"denied" in seen


def test_help_names_every_command() -> None:
    text = _glovebox("--help").stdout
    for name in (
        "doctor", "check", "init", "explain", "approve", "revoke", "run", "exec", "shell", "verify", "ps",
        "events", "usage",
    ):  # fmt: skip
        assert name in text
        assert _glovebox(name, "--help").returncode == 0

"""Attacks on what is outside: where results go, what the disk holds, what the client understands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_glovebox.artifacts import intake
from jupyter_glovebox.cli import show

from .test_cli import SPEC

OUTPUTS = "version: 1\nname: attack\noutputs: {path: outputs/deep, types: [txt]}\n"
DISK = "version: 1\nname: attack\nscratch: {size: 32M, on: disk}\nbudgets: {wall_time: 40s}\n"
# A cell that signs messages of its own with the kernel's key.
FORGE = """
import hashlib, hmac, json
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
key, parent = app.kernel.session.key, json.dumps(app.kernel.get_parent()["header"], default=str).encode()
def forge(kind, content):
    header = json.dumps({"msg_id": "x", "msg_type": kind, "session": "x", "username": "x", "version": "5.3",
                         "date": "2020-01-01T00:00:00Z"}).encode()
    parts = [header, parent, b"{}", content]
    signature = hmac.new(key, b"".join(parts), hashlib.sha256).hexdigest().encode()
    app.iopub_thread.socket.send_multipart([b"<IDS|MSG>", signature, *parts])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def _glovebox(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_glovebox", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def _exec(manifest: str, code: str) -> dict[str, Any]:
    Path("m.yaml").write_text(manifest)
    done = _glovebox("exec", "--manifest", "m.yaml", "--json", "--", "python3", "-c", code)
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


def _run(code: str, *more: str | Path) -> subprocess.CompletedProcess[str]:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code)], metadata={"kernelspec": SPEC}
    )
    nbformat.write(notebook, "a.ipynb")
    return _glovebox("run", "a.ipynb", *more)


# 2,600 levels, out of pieces with short names.
DEEP = """
import os, time
for n in range(40):
    os.makedirs(f"c{n}/" + "/".join("d" * 64))
for n in range(39, 0, -1):
    os.rename(f"c{n}", f"c{n - 1}/" + "/".join("d" * 64) + "/c")
time.sleep(30)
"""
WRITE = "open('outputs/deep/rc.txt', 'w').write('ssh-ed25519 AAAA')"


def test_a_result_goes_to_the_outputs_folder(folder: Path) -> None:
    """The control of the next test."""
    result = _exec(OUTPUTS, WRITE)
    assert result["artifacts"][0]["exported_to"] == f"{folder}/outputs/deep/rc.txt"
    assert (folder / "outputs/deep/rc.txt").is_file()


@pytest.mark.parametrize("link", ["outputs", "outputs/deep"])
def test_a_link_in_place_of_the_outputs_folder_leads_nowhere(folder: Path, link: str, tmp_path: Path) -> None:
    """Who owns the notebook's folder could else have results written into `~/.ssh`."""
    target = tmp_path / "target"
    (target / "deep").mkdir(parents=True)
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(target)
    done = _exec(OUTPUTS, WRITE).get("artifacts", [])
    assert [a["exported_to"] for a in done] in ([], [None])
    assert [p for p in target.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            DEEP,
            "too deeply",
        ),
        (
            "import os, time\nf = open('f', 'wb', buffering=0); os.unlink('f')\n"
            "for _ in range(96):\n f.write(bytes(1 << 20))\ntime.sleep(30)",
            "MiB",
        ),
    ],
    ids=["deep", "deleted"],
)
def test_a_scratch_on_disk_cannot_be_overfilled_or_left(
    folder: Path, code: str, said: str, own_folders: Path
) -> None:
    result = _exec(DISK, code)
    assert result["status"] == "budget"
    assert said in result["reason"]
    assert all(step["verified"] for step in result["cleanup"].values()), result["cleanup"]
    assert os.listdir(own_folders / "state" / "scratch") == []


def test_a_scratch_that_was_left_is_swept(folder: Path, own_folders: Path) -> None:
    left = own_folders / "state" / "scratch" / "left"
    left.mkdir(parents=True, mode=0o700)
    for parent in (left.parent, left.parent.parent):
        parent.chmod(0o700)
    (left / "file").touch()
    assert _exec(DISK, "print(1)")["stdout"] == "1\n"
    assert not left.exists()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", "{not json"),
        ("stream", '{"name": "stdout"}'),
        ("stream", '{"name": 5, "text": {}}'),
        ("display_data", '{"data": [1], "metadata": 7}'),
        ("comm_msg", "{}"),
        ("stream", '{"a":' + "[" * 100_000 + "}"),
    ],
    ids=["no-json", "no-text", "wrong-types", "wrong-data", "no-comm", "nested"],
)
def test_messages_that_no_client_understands_end_a_run_in_order(
    folder: Path, kind: str, content: str
) -> None:
    done = _run(f"{FORGE}\nforge({kind!r}, {content.encode()!r})", "--json")
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)
    assert result["status"] in ("error", "completed")
    assert result["cleanup"]["processes"]["verified"]


def test_the_executed_notebook_holds_any_text(folder: Path) -> None:
    text = json.dumps({"name": "stdout", "text": "\ud800\x9b"})
    done = _run(f"{FORGE}\nforge('stream', {text.encode()!r})", "--output", "out.ipynb")
    assert done.returncode == 0, done.stderr
    assert nbformat.read("out.ipynb", as_version=4).cells[0].outputs[0]["text"] == "\ud800\x9b"


@pytest.mark.parametrize(
    "name",
    [
        "jupyter_server_config.json",
        "sub/ipython_config.json",
        "a.glovebox.yaml",
        "Makefile",
        "authorized_keys",
    ],
)
def test_names_that_programs_obey_stay_inside(tmp_path: Path, name: str) -> None:
    folder, snapshots = tmp_path / "out", tmp_path / "snapshots"
    snapshots.mkdir()
    for wanted in (name, "plain.json"):
        (folder / wanted).parent.mkdir(parents=True, exist_ok=True)
        (folder / wanted).write_text("{}")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = intake.collect(fd, snapshots, max_files=9, max_file_size=99, max_total_size=99)
    finally:
        os.close(fd)
    taken = {candidate.name: candidate.snapshot is not None for candidate in found}
    assert taken == {name: False, "plain.json": True}


def test_json_cannot_steer_a_terminal() -> None:
    hostile = "\x1b]0;x\x07\x7f\x9b31m\u202e\u2066\u2028\ud800 ü"
    text = show.json_text({"a": hostile})
    assert "ü" in text
    assert text.encode()
    assert not [c for c in text if c != "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0)]
    assert not set("\u202e\u2066\u2028\ud800") & set(text)
    assert json.loads(text) == {"a": hostile}

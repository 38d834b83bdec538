"""Approvals: bound to a notebook and a digest, private, never lost and never forged by accident."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from jupyter_glovebox.errors import GloveboxError, RefusedError, UsageError
from jupyter_glovebox.locations import config_dir, state_dir
from jupyter_glovebox.manifest import approvals
from jupyter_glovebox.manifest.compile import resolve
from jupyter_glovebox.manifest.loading import load_manifest

HEAD = "version: 1\nname: x\n"


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "n.ipynb"
    path.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    (tmp_path / "a.csv").write_text("x")
    path.with_suffix(".glovebox.yaml").write_text(HEAD + "inputs: [a.csv]\n")
    return path


def _approve(notebook: Path, **arguments: object) -> approvals.Approval:
    manifest = notebook.with_suffix(".glovebox.yaml")
    plan = resolve(notebook, manifest_file=manifest, caller_approves=True).plan
    sources = {grant.path: grant.source for grant in plan.inputs}
    return approvals.approve(notebook, manifest, sources=sources, **arguments)  # type: ignore[arg-type]


def test_what_is_kept(notebook: Path) -> None:
    before = time.time()
    approval = _approve(notebook)
    assert approval.notebook == os.path.realpath(notebook)
    assert approval.manifest == load_manifest(notebook.with_suffix(".glovebox.yaml")).digest
    assert before <= approval.time <= time.time()
    assert approval.sources == {str(notebook.parent / "a.csv"): str(notebook.parent / "a.csv")}
    assert approvals.stored() == [approval] == [approvals.find(notebook)]
    again = _approve(notebook, method="click")
    assert approvals.stored() == [again], "one approval for each notebook"


def test_by_the_notebooks_real_path(notebook: Path, tmp_path: Path) -> None:
    _approve(notebook)
    (tmp_path / "other.ipynb").symlink_to(notebook)
    assert approvals.find(tmp_path / "other.ipynb") == approvals.find(notebook)
    copy = tmp_path / "sub/n.ipynb"
    copy.parent.mkdir()
    copy.write_bytes(notebook.read_bytes())
    copy.with_suffix(".glovebox.yaml").write_bytes(notebook.with_suffix(".glovebox.yaml").read_bytes())
    assert resolve(copy).plan.baseline, "a copied folder brings no approval along"
    assert not resolve(tmp_path / "other.ipynb").plan.baseline


def test_a_manifest_that_changes_while_it_is_read(notebook: Path) -> None:
    manifest = notebook.with_suffix(".glovebox.yaml")
    shown = load_manifest(manifest).digest
    manifest.write_text(HEAD + "inputs: ['.']\n")
    with pytest.raises(RefusedError, match="changed while"):
        approvals.approve(notebook, manifest, digest=shown)
    assert approvals.stored() == []


def test_a_manifest_that_is_broken_afterwards(notebook: Path) -> None:
    _approve(notebook)
    assert resolve(notebook).plan.inputs
    notebook.with_suffix(".glovebox.yaml").write_text(HEAD + "imputs: []\n")
    found = resolve(notebook)
    assert found.plan.baseline
    assert not found.plan.inputs
    assert "line 3" in found.notice
    assert "imputs" in found.notice


def test_a_named_manifest_needs_approval_as_well(notebook: Path) -> None:
    other = notebook.with_name("other.yaml")
    other.write_text(HEAD + "inputs: [n.ipynb]\n")
    _approve(notebook)
    found = resolve(notebook, manifest_file=other)
    assert found.plan.baseline
    assert "other.yaml has changed" in found.notice


def test_a_click_does_not_count_where_policy_asks_for_a_code(notebook: Path) -> None:
    _approve(notebook, method="click")
    assert resolve(notebook).plan.approval == "click"
    config_dir().mkdir(parents=True)
    (config_dir() / "policy.yaml").write_text("version: 1\napproval: code\n")
    found = resolve(notebook)
    assert found.plan.baseline
    assert "without the code" in found.notice
    _approve(notebook, method="code")
    assert resolve(notebook).plan.approval == "code"


def test_policy_without_a_baseline(notebook: Path) -> None:
    config_dir().mkdir(parents=True)
    (config_dir() / "policy.yaml").write_text("version: 1\nbaseline: refuse\n")
    with pytest.raises(RefusedError, match="approve"):
        resolve(notebook)
    with pytest.raises(RefusedError):
        resolve(None, workdir=notebook.parent)
    _approve(notebook)
    assert not resolve(notebook).plan.baseline


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[{}]", b'{"a": 1}', b"\xff", b'[{"notebook": 1}]', b"null"], ids=repr
)
def test_a_damaged_store_is_an_error_everywhere(notebook: Path, content: bytes) -> None:
    (state_dir() / "approvals.json").write_bytes(content)
    for act in (
        approvals.stored,
        lambda: approvals.find(notebook),
        lambda: approvals.revoke(notebook),
        lambda: resolve(notebook),
        lambda: approvals.approve(notebook, notebook.with_suffix(".glovebox.yaml")),
    ):
        with pytest.raises(GloveboxError, match="approvals"):
            act()
    assert (state_dir() / "approvals.json").read_bytes() == content, "nothing is thrown away"


def test_the_store_is_private_and_whole(notebook: Path) -> None:
    old = os.umask(0)
    try:
        _approve(notebook)
    finally:
        os.umask(old)
    for path in state_dir().iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list(state_dir().glob("*.new"))


def test_a_store_that_cannot_be_written(notebook: Path) -> None:
    (state_dir() / "approvals.lock").mkdir()
    with pytest.raises(GloveboxError, match="cannot be changed"):
        _approve(notebook)


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "text", "nul", "bytes", "loop"])
def test_what_is_no_notebook(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "n.ipynb"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "text":
        path = tmp_path / "n.py"
        path.touch()
    elif kind == "nul":
        path = tmp_path / "n\0.ipynb"
    elif kind == "bytes":
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.ipynb"))
        path.touch()
    elif kind == "loop":
        path.symlink_to(path.name)
    with pytest.raises(UsageError) as caught:
        resolve(path)
    assert caught.value.remedy
    assert caught.value.message.isprintable()

"""An honest notebook runs unchanged."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from jupyter_glovebox.cli.runner import run_notebook
from jupyter_glovebox.manifest.compile import resolve
from nbclient import NotebookClient

from .ordinary import MANIFEST, NOTEBOOKS, PEOPLE


def _write(name: str, folder: Path) -> Path:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in NOTEBOOKS[name]],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    path = folder / "notebook.ipynb"
    nbformat.write(notebook, path)
    (folder / "people.csv").write_bytes(PEOPLE)
    (folder / "notebook.glovebox.yaml").write_text(MANIFEST)
    return path


def test_there_are_twenty() -> None:
    assert len(NOTEBOOKS) >= 20


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_unchanged(name: str, tmp_path: Path) -> None:
    path = _write(name, tmp_path)
    resolution = resolve(path, manifest_file=tmp_path / "notebook.glovebox.yaml", caller_approves=True)
    result = run_notebook(path, resolution)
    assert result.status == "completed", result.reason
    # Nothing an honest notebook does may look like an attack.
    assert [f"{e.event_class} {e.operation} {e.target}" for e in result.blocked] == []
    assert all(step["verified"] for step in result.cleanup.values()), result.cleanup
    left = {"notebook.ipynb", "people.csv", "notebook.glovebox.yaml"}
    assert {p.name for p in tmp_path.iterdir()} == left, "scratch leaked into the notebook's folder"


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_with_the_plain_provisioner(name: str, tmp_path: Path) -> None:
    path = _write(name, tmp_path)
    NotebookClient(nbformat.read(path, 4), resources={"metadata": {"path": str(tmp_path)}}).execute()

"""Inputs: names, patterns and links on a real file system."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from jupyter_glovebox.errors import RefusedError
from jupyter_glovebox.manifest.compile import compile_plan
from jupyter_glovebox.manifest.loading import ManifestError, parse_manifest, parse_policy
from jupyter_glovebox.manifest.plan import InputGrant

HEAD = "version: 1\nname: x\n"


def grants(text: str, folder: Path, limits: str = "version: 1\n", **arguments: Any) -> dict[str, InputGrant]:
    """The inputs of a manifest by their names relative to the folder."""
    plan = compile_plan(
        parse_manifest(HEAD + text, "m.yaml"), parse_policy(limits, "policy.yaml"),
        notebook=None, workdir=folder, approval="caller", **arguments,
    )  # fmt: skip
    return {os.path.relpath(grant.path, folder): grant for grant in plan.inputs}


def refused(text: str, folder: Path, *words: str, **arguments: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        grants(text, folder, **arguments)
    for word in words:
        assert word in caught.value.message


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder whose own name has pattern characters in it."""
    folder = tmp_path / "proj [2024]*"
    (folder / "data/deep/er").mkdir(parents=True)
    for name in (
        "a.csv",
        "data/b.csv",
        "data/deep/c.csv",
        "data/deep/er/d.csv",
        "data/.hidden.csv",
        "e[1].csv",
    ):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.csv", ["a.csv", "e[1].csv"]),
        ("data/*.csv", ["data/b.csv"]),
        ("data/.*.csv", ["data/.hidden.csv"]),
        ("data/**/*.csv", ["data/b.csv", "data/deep/c.csv", "data/deep/er/d.csv"]),
        ("**/c.csv", ["data/deep/c.csv"]),
        ("**/deep/**/*.csv", ["data/deep/c.csv", "data/deep/er/d.csv"]),
        ("data/d[ef]ep", ["data/deep"]),
        ("e[1].csv", ["e[1].csv"]),
        ("?.csv", ["a.csv"]),
    ],
)
def test_patterns(work: Path, pattern: str, names: list[str]) -> None:
    assert list(grants(f"inputs: ['{pattern}']\n", work)) == names


def test_patterns_elsewhere(work: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x.csv").write_text("x")
    assert list(grants(f"inputs: ['{tmp_path}/other/*.csv']\n", work)) == ["../other/x.csv"]


def test_links_in_circles_end(work: Path) -> None:
    """Followed, two links to the folder itself make 2^40 names."""
    (work / "l1").symlink_to(".")
    (work / "l2").symlink_to(".")
    assert (work / "l1/l2/l1/l2/a.csv").exists(), "the circle is there"
    start = time.monotonic()
    assert "data/b.csv" in grants("inputs: ['**/*.csv']\n", work)
    assert time.monotonic() - start < 5


def test_links_to_nowhere(work: Path) -> None:
    (work / ".#lock").symlink_to("user@host.1234")
    (work / "gone.csv").symlink_to("nothing")
    assert "gone.csv" not in grants("inputs: ['*.csv']\n", work)
    assert {".#lock", "gone.csv"}.isdisjoint(grants("inputs: ['.']\n", work))
    refused("inputs: [gone.csv]\n", work, "gone.csv", "No such file")


def test_the_whole_folder(work: Path) -> None:
    (work / "results/new").mkdir(parents=True)
    (work / "results/old.txt").write_text("x")
    (work / ".ipynb_checkpoints").mkdir()
    names = ["a.csv", "data", "e[1].csv"]
    assert list(grants("inputs: ['.']\n", work)) == [*names, "results"]
    assert list(grants(f"inputs: ['{work}']\n", work)) == [*names, "results"]
    assert list(grants("inputs: [.]\noutputs: {path: results}\n", work)) == names
    # The rest of a folder that holds the outputs stays readable.
    assert "results" in grants("inputs: [.]\noutputs: {path: results/new}\n", work)
    os.mkfifo(work / "pipe")
    refused("inputs: [.]\n", work, "pipe", "neither a file nor a folder")


def test_too_many(work: Path) -> None:
    for number in range(1001):
        (work / f"{number}.txt").touch()
    refused("inputs: ['*.txt']\n", work, "1000", "folder")
    refused("inputs: ['.']\n", work, "1000")


@pytest.mark.parametrize("path", ["outputs", "outputs/x.csv", "link.csv", "linked/x.csv"])
def test_nothing_from_the_outputs(work: Path, path: str) -> None:
    (work / "outputs").mkdir()
    (work / "outputs/x.csv").write_text("x")
    (work / "link.csv").symlink_to("outputs/x.csv")
    (work / "linked").symlink_to("outputs")
    assert grants(f"inputs: ['{path}']\n", work)
    refused(f"inputs: ['{path}']\noutputs: {{path: outputs}}\n", work, "outputs folder")


def test_names_that_are_no_text(work: Path) -> None:
    (Path(os.fsdecode(os.fsencode(work) + b"/\xff.csv"))).touch()
    refused("inputs: ['*.csv']\n", work, "\\xff", "UTF-8")


def test_a_home_is_written_out(work: Path) -> None:
    refused("inputs: [~/data.csv]\n", work, "Write the home folder out")


def test_a_pin_is_never_lost(work: Path) -> None:
    pin, other = "a" * 64, "b" * 64
    for text in (
        f"[{{path: a.csv, sha256: {pin}}}, '*.csv']",
        f"['*.csv', {{path: ./a.csv, sha256: {pin}}}]",
    ):
        assert grants(f"inputs: {text}\n", work)["a.csv"].sha256 == pin
    refused(
        f"inputs: [{{path: a.csv, sha256: {pin}}}, {{path: ./a.csv, sha256: {other}}}]\n",
        work,
        "two different",
    )
    refused(f"inputs: [{{path: data, sha256: {pin}}}]\n", work, "folder")


def test_policy_against_inputs_outside(work: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("x")
    (work / "link.csv").symlink_to(tmp_path / "secret.csv")
    strict = "version: 1\nforbidden_inputs_outside: true\n"
    assert grants("inputs: [link.csv, a.csv]\n", work)
    assert grants("inputs: [a.csv]\n", work, strict)
    for path in (str(tmp_path / "secret.csv"), "link.csv", "*k.csv"):
        refused(f"inputs: ['{path}']\n", work, "policy.yaml", "outside", limits=strict)


def test_what_leads_elsewhere_than_approved(work: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("x")
    (work / "link.csv").symlink_to("a.csv")
    manifest = "inputs: ['*.csv', data]\n"
    approved = {grant.path: grant.source for grant in grants(manifest, work).values()}
    assert grants(manifest, work, approved=approved)

    (work / "new.csv").write_text("a new file where a person allowed every file")
    assert "new.csv" in grants(manifest, work, approved=approved)

    (work / "sly.csv").symlink_to(tmp_path / "secret.csv")
    with pytest.raises(RefusedError, match="was not there"):
        grants(manifest, work, approved=approved)
    (work / "sly.csv").unlink()

    (work / "link.csv").unlink()
    (work / "link.csv").symlink_to("e[1].csv")
    with pytest.raises(RefusedError, match="led to"):
        grants(manifest, work, approved=approved)


def test_a_problem_names_its_line(work: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        grants("inputs:\n  - a.csv\n  - {path: missing.csv}\n", work)
    assert [(p.line, p.column) for p in caught.value.problems] == [(5, 5)]

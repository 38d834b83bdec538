"""Drafts: what a notebook's code names, and nothing that a person would not want to be asked about."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_glovebox.errors import UsageError
from jupyter_glovebox.ledger.events import Event
from jupyter_glovebox.manifest.compile import compile_plan
from jupyter_glovebox.manifest.draft import draft_manifest
from jupyter_glovebox.manifest.loading import parse_manifest, parse_policy
from jupyter_glovebox.manifest.model import Manifest, Policy


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "data/sub").mkdir(parents=True)
    for name in (
        "data/in.csv",
        "data/sub/x.csv",
        "a.csv",
        ".env",
        "my_token.txt",
        "[1] odd*.csv",
        "plain.txt",
    ):
        (tmp_path / name).write_text("x")
    return tmp_path


def write(folder: Path, *cells: str) -> Path:
    path = folder / "n.ipynb"
    path.write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells], "metadata": {}})
    )
    return path


def draft(
    folder: Path, *cells: str, events: list[Event] | None = None, policy: Policy | None = None
) -> Manifest:
    """The drafted manifest, after it was found to load and compile."""
    policy = policy or Policy()
    path = write(folder, *cells)
    manifest = parse_manifest(draft_manifest(path, events or [], policy=policy))
    compile_plan(manifest, policy, notebook=path, workdir=folder, approval="caller")
    return manifest


def event(target: str, **more: object) -> Event:
    return Event(time=0, event_class="not-granted", operation="open", target=target, kernel_id="k", notebook=None,
                 plan="p", **more)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "inputs"),
    [
        ("pd.read_csv('a.csv')", ["a.csv"]),
        ("pd.read_csv('./data/../a.csv')", ["a.csv"]),
        ("pd.read_csv(Path('data') / 'in.csv')", ["data"]),
        ("pd.read_csv(f'data/{name}.csv'); open('data/in.csv')", ["data"]),
        ("pd.read_csv('[1] odd*.csv')", ["[1] odd*.csv"]),
        ("pd.read_csv('missing.csv'); 'a.csv x'", []),
        ("open('.env'); open('my_token.txt'); open('/etc/passwd'); open('../'); open('.'); open('/')", []),
        ("open('/usr/share/dict'); open('/usr')", []),
        ("%load_ext x\nfor i in x:\n    !ls\n    open('a.csv')\nfiles = !ls\nopen?", ["a.csv"]),
        ("%%bash\ncat a.csv | grep x", []),
        ("'a.csv", []),
        ("'\\d'; open('a.csv')", ["a.csv"]),
    ],
)
def test_inputs(work: Path, code: str, inputs: list[str]) -> None:
    assert [entry.path for entry in draft(work, code).inputs] == inputs


def test_absolute_names_and_links(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = work / "nb"
    nested.mkdir()
    (nested / "in.csv").write_text("x")
    (nested / "sly.csv").symlink_to("/etc/passwd")
    code = f"open({str(nested / 'in.csv')!r}); open('../data/in.csv'); open('sly.csv'); open({str(work)!r})"
    monkeypatch.setattr("jupyter_glovebox.manifest.draft._SYSTEM", ("/usr",))  # the tests live in /tmp
    assert [entry.path for entry in draft(nested, code).inputs] == [str(work / "data/in.csv"), "in.csv"]


@pytest.mark.parametrize(
    ("code", "place", "types"),
    [
        ("1 + 1", "outputs", None),
        ("df.to_csv('results/a.csv'); plt.savefig('results/b.png')", "results", ("csv", "png")),
        ("df.to_csv('out/x/a.csv'); df.to_csv('out/y/b.csv')", "out", ("csv",)),
        ("df.to_csv('a.csv')", ".", ("csv",)),
        ("df.to_csv('out/a.csv'); df.to_csv('b.csv')", ".", ("csv",)),
        ("pd.read_csv('data/in.csv').to_csv('data/out.csv')", ".", ("csv",)),
        ("pd.read_csv('data/in.csv').to_csv('data/new/out.csv')", "data/new", ("csv",)),
        ("open('out/x.json', 'w')", "out", ("json",)),
        ("Path('out/x.md').write_text('plain.txt')", "out", ("md",)),
        ("Path('out/x.md').open(mode='w')", "out", ("md",)),
        ("df.to_csv('s3://bucket/x.csv'); df.to_csv('~/x.csv'); df.to_csv('/srv/x.csv')", "outputs", None),
        ("df.to_csv('.git/x.csv')", ".", ("csv",)),
        ("fig.write_html('out/f.html')", "out", ("html",)),
    ],
)
def test_outputs(work: Path, code: str, place: str, types: tuple[str, ...] | None) -> None:
    outputs = draft(work, code).outputs
    assert outputs
    assert outputs.path == place
    if types is not None:
        assert outputs.types == types


def test_results_that_are_read_back_are_no_inputs(work: Path) -> None:
    (work / "results").mkdir()
    (work / "results/old.csv").write_text("x")
    manifest = draft(
        work, "os.makedirs('results'); df.to_csv('results/old.csv'); pd.read_csv('results/old.csv')"
    )
    assert not manifest.inputs
    assert manifest.outputs
    assert manifest.outputs.path == "results"


def test_what_was_blocked(work: Path) -> None:
    events = [
        event(str(work / "plain.txt")),
        event(str(work / "a.csv"), sensitive=True),
        event(str(work / ".env")),
        event("10.0.0.1:443"),
        event("\\x1b[31m"),
    ]
    assert [entry.path for entry in draft(work, "1", events=events).inputs] == ["plain.txt"]


def test_under_a_strict_policy(work: Path) -> None:
    strict = parse_policy(
        "version: 1\nforbidden_inputs_outside: true\nbudgets: {memory: 100M}\nscratch: 1M\n"
        "outputs: {types: [csv], max_files: 1, secrets: reject}\n"
    )
    (work / "far.csv").symlink_to("/usr/share")
    manifest = draft(
        work, "open('far.csv'); open('a.csv'); plt.savefig('o/x.png'); df.to_csv('o/x.csv')", policy=strict
    )
    assert [entry.path for entry in manifest.inputs] == ["a.csv"]
    assert manifest.outputs
    assert manifest.outputs.types == ("csv",)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff", b"[]", b'{"cells": 1}', b'{"cells": [{"cell_type": "code"}]}', b"[" * 100_000,
     b'{"cells": [{"cell_type": "code", "source": [1]}]}'],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_what_is_no_notebook(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n.ipynb").write_bytes(content)
    with pytest.raises(UsageError):
        draft_manifest(tmp_path / "n.ipynb")


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "n.ipynb")
    with pytest.raises(UsageError):
        draft_manifest(tmp_path / "n.ipynb")


_NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=("Cs",)),
    min_size=1,
    max_size=12,
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)


@given(st.lists(_NAMES, min_size=1, max_size=5, unique=True), st.lists(_NAMES, max_size=3))
@settings(max_examples=100, deadline=None)
def test_any_names_give_a_draft_that_loads_and_compiles(
    tmp_path_factory: pytest.TempPathFactory, reads: list[str], writes: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("draft")
    for name in reads:
        (folder / name).write_text("x")
    code = [f"open({name!r})" for name in reads] + [f"df.to_csv({f'out/{name}'!r})" for name in writes]
    draft(folder, "\n".join(code))

"""Reading manifests and policies: every problem with its place, and nothing but our own error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_glovebox.manifest import schema
from jupyter_glovebox.manifest.loading import (
    ManifestError,
    load_manifest,
    load_policy,
    parse_manifest,
    parse_policy,
)
from jupyter_glovebox.manifest.model import MANIFEST, POLICY, Policy

ROOT = Path(__file__).resolve().parents[2]
HEAD = "version: 1\nname: x\n"


def problems(text: str | bytes) -> list[tuple[int, int, str]]:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, "m.yaml")
    assert "m.yaml" in caught.value.message
    return [(p.line, p.column, f"{p.message} {p.remedy}") for p in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (HEAD + "imputs: []\n", (3, 1), "inputs"),
        (HEAD + "name: y\n", (3, 1), "twice"),
        (HEAD + "scratch: {size: 5 parsecs}\n", (3, 17), "512M"),
        (HEAD + "scratch: {size: 0}\n", (3, 17), "size"),
        (HEAD + "budgets: {cpu_time: 30}\n", (3, 21), "30s"),
        (HEAD + "budgets:\n  memory: lots\n", (4, 11), "size"),
        (HEAD + "budgets:\n", (3, 9), "empty"),
        (HEAD + "inputs: a.csv\n", (3, 9), "list"),
        (HEAD + "inputs: ['']\n", (3, 10), "path"),
        (HEAD + "inputs: [a, a]\n", (3, 13), "twice"),
        (HEAD + "inputs: [{path: a, sha256: 12}]\n", (3, 28), "64"),
        (HEAD + "outputs: {types: [exe]}\n", (3, 19), "one of"),
        (HEAD + "require: [everything]\n", (3, 11), "one of"),
        (HEAD + "environment: {'a b': c}\n", (3, 15), "name"),
        (HEAD + "isolation: docker\n", (3, 12), "bubblewrap"),
        (HEAD + "inputs: &a [x]\n", (3, 9), "Anchors"),
        (HEAD + "inputs: !!set {x}\n", (3, 9), "Tags"),
        (HEAD + "---\nversion: 1\n", (3, 1), "document"),
        ("version: 1\n", (1, 1), "name"),
        ("version: 2\nname: x\n", (1, 10), "1"),
        ("", (1, 1), "empty"),
        ("- a\n", (1, 1), "key"),
        ("version: 1\nname: [\n", (3, 1), "YAML"),
        (b"version: 1\nname: \xff\n", (2, 1), "UTF-8"),
        (HEAD + "inputs: " + "[" * 50 + "]" * 50 + "\n", None, "deep"),
    ],
)
def test_every_problem_has_its_place(text: str | bytes, place: tuple[int, int] | None, words: str) -> None:
    found = problems(text)
    if place is not None:
        assert place in [(line, column) for line, column, _ in found], found
    assert words.lower() in " ".join(f[2] for f in found).lower()


def test_all_problems_at_once() -> None:
    assert len(problems(HEAD + "a: 1\nb: 2\nscratch: {size: x}\n")) == 3


def test_scalars_are_what_is_expected() -> None:
    """YAML 1.1 would make booleans, base-60 numbers and octals of these."""
    manifest = parse_manifest(HEAD + "inputs: [no, 1:30, 0o17, on, ~a]\n")
    assert [i.path for i in manifest.inputs] == ["no", "1:30", "0o17", "on", "~a"]


def test_sizes_and_times() -> None:
    manifest = parse_manifest(
        HEAD + "scratch: {size: 1.5G}\nbudgets: {memory: 512M, cpu_time: 90s, wall_time: 1d}\n"
    )
    assert manifest.scratch.size == 3 << 29
    assert (manifest.budgets.memory, manifest.budgets.cpu_time, manifest.budgets.wall_time) == (
        512 << 20,
        90,
        86400,
    )


def test_the_digest_is_of_the_meaning() -> None:
    one = parse_manifest(HEAD + "inputs: [a]\nscratch: {size: 1G}\n")
    two = parse_manifest("# a comment\nname: x\nversion: 1\nscratch:\n  size: 1024M\ninputs:\n- a\n", "other")
    assert one.digest == two.digest
    assert one.digest != parse_manifest(HEAD + "inputs: [b]\nscratch: {size: 1G}\n").digest


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "big").write_bytes(b"#" * (2 << 20))
    (tmp_path / "link").symlink_to("loop")
    (tmp_path / "loop").symlink_to("link")
    for name in ("fifo", "big", "link", "missing", "nul\0", "."):
        with pytest.raises(ManifestError):
            load_manifest(tmp_path / name)
    (tmp_path / "target").write_text("version: 1\n")
    (tmp_path / "alias").symlink_to("target")
    assert load_policy(tmp_path / "alias") == load_policy(tmp_path / "target").__class__(
        file=str(tmp_path / "alias")
    )
    with pytest.raises(ManifestError):
        load_policy(tmp_path / "alias", managed=True)


_WORDS = st.sampled_from(
    ["version", "name", "inputs", "scratch", "outputs", "size", "1", "512M", "[", "]", "{", "}", ":", "-", "\n", " ",
     "&a", "*a", "!!x", "---", "'", '"', "|", ">", "#", "\t", "?", ",", "%", "\x00", "\ud800", "é", "budgets"]
)  # fmt: skip


@given(st.one_of(st.text(), st.binary(), st.lists(_WORDS).map("".join), st.lists(_WORDS).map(" ".join)))
@settings(max_examples=400, deadline=None)
def test_the_loader_raises_only_its_own_error(text: str | bytes) -> None:
    for parse in (parse_manifest, parse_policy):
        try:
            parse(text)
        except ManifestError as error:
            assert error.problems


def test_generated_files_are_current(tmp_path: Path) -> None:
    schema.write(tmp_path)
    for made in tmp_path.iterdir():
        assert (ROOT / "manifests" / made.name).read_text() == made.read_text(), "run: make schema"


def test_the_sample_policy_is_the_default() -> None:
    assert parse_policy(schema.sample_policy(), "") == Policy()


@pytest.mark.parametrize("path", sorted((ROOT / "manifests").rglob("*.glovebox.yaml")), ids=lambda p: p.name)
def test_ready_manifests_load_and_fit_the_schema(path: Path) -> None:
    load_manifest(path)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema.manifest_schema())


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (HEAD, True),
        (HEAD + "inputs: [a, {path: b}]\n", True),
        (HEAD + "imputs: []\n", False),
        (HEAD + "scratch: {size: huge}\n", False),
        (HEAD + "outputs: {types: [exe]}\n", False),
        ("version: 1\n", False),
        (HEAD + "budgets: {processes: 2}\n", False),
    ],
)
def test_schema_and_loader_agree(text: str, good: bool) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema.manifest_schema())))
    assert validator.is_valid(yaml.safe_load(text)) == good
    if good:
        parse_manifest(text)
    else:
        problems(text)


def test_the_reference_has_every_key() -> None:
    text = (ROOT / "docs/manifest.md").read_text()
    manifest, _, policy = text.partition("\n## Policy\n")
    for section, keys in ((manifest, MANIFEST.keys), (policy, POLICY.keys)):
        for name, key in keys.items():
            inner = getattr(key.kind, "keys", {}) if section is manifest else {}
            assert f"`{name}`" in section or f"`{name}." in section, name
            for part in inner:
                assert f"`{name}.{part}`" in section or f"`{part}`" in section, f"{name}.{part}"

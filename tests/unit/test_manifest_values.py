"""Single values of manifests: paths, sizes, variables, and files that are dangerous to open."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jsonschema
import pytest
import yaml
from jupyter_glovebox.manifest import schema
from jupyter_glovebox.manifest.loading import ManifestError, load_manifest, parse_manifest

HEAD = "version: 1\nname: x\n"
SCHEMA = jsonschema.Draft202012Validator(schema.manifest_schema())

GOOD = [
    "inputs: [a, ./b, a/../c, /srv/x, 'data/*.csv', '..a', 'no']",
    "inputs: [{path: a, sha256: null}, {path: b}]",
    "outputs: {path: out}",
    "outputs: {path: ./a/b}",
    "outputs: {path: .}",
    "outputs: {expect: {clean.csv: {columns: {id: string, n: number, k: integer}, min_rows: 0}}}",
    "scratch: {size: 1048576}",
    "scratch: {size: 1.5G, 'on': disk}",
    "scratch: {size: 512 MiB}",
    "budgets: {cpus: 0.5, processes: 64, wall_time: 1.5h}",
    "environment: {A: text, B: '', C: 1, D: true, PYTHONHASHSEED: '0'}",
    "network: [{host: a.example, paths: [/v1/**], rate: 5/s, max_bytes_in: 1M}]",
    "credentials: [{name: A, use: a.example, ttl: 15m}]",
    "operations: [query-dataset]",
    "devices: [gpu]",
    "isolation: gvisor",
    "observation: strict",
    "display: {html: deny}",
    "inputs: []",
]
BAD = [
    "inputs: [..]",
    "inputs: [../x]",
    "inputs: ['']",
    "inputs: [a, a]",
    "inputs: [null]",
    "inputs: [{}]",
    "outputs: {path: ../x}",
    "outputs: {path: /tmp}",
    "outputs: {path: .git}",
    "outputs: {path: a/.ipython/b}",
    "outputs: {path: ''}",
    "outputs: {expect: {a.csv: {min_row: 1}}}",
    "outputs: {expect: {a.csv: {columns: {id: strnig}}}}",
    "outputs: {max_files: 0}",
    "scratch: {size: 1.5}",
    "scratch: {size: 1X}",
    "scratch: {size: -1}",
    "budgets: {cpus: 0}",
    "budgets: {cpu_time: 30}",
    "budgets: {processes: '128'}",
    "environment: {PATH: x}",
    "environment: {LD_PRELOAD: x}",
    "environment: {JUPYTER_TOKEN: x}",
    "environment: {1A: x}",
    "network: [{port: 1}]",
    "network: [{host: a.example, paths: [v1]}]",
    "network: [{host: a.example, rate: 5}]",
    "network: [{host: a.example, websocket: 1}]",
    "version: 2",
    "nmae: x",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_values(text: str) -> None:
    parse_manifest(f"{HEAD}{text}\n")
    SCHEMA.validate(yaml.safe_load(f"{HEAD}{text}\n"))


@pytest.mark.parametrize("text", BAD)
def test_bad_values(text: str) -> None:
    head = "name: x\n" if text.startswith("version") else HEAD
    with pytest.raises(ManifestError) as caught:
        parse_manifest(f"{head}{text}\n")
    assert all(problem.line == head.count("\n") + 1 for problem in caught.value.problems)
    assert not SCHEMA.is_valid(yaml.safe_load(f"{head}{text}\n"))


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("1", 1),
        ("1K", 1024),
        ("1.5K", 1536),
        ("2M", 2 << 20),
        ("2MB", 2 << 20),
        ("2MiB", 2 << 20),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_powers_of_1024(size: str, count: int) -> None:
    assert parse_manifest(f"{HEAD}scratch: {{size: {size}}}\n").scratch.size == count


def test_text_is_taken_as_it_is_written() -> None:
    found = parse_manifest(HEAD + "environment: {A: no, B: '', C: 1.50, D: ' x '}\ninputs: [' a']\n")
    assert found.environment == {"A": "no", "B": "", "C": "1.50", "D": " x "}
    assert found.inputs[0].path == " a"


def test_every_word_of_a_problem_is_safe_to_print() -> None:
    hostile = "\\e[31m\\u202ex"
    for text in (
        f'"{hostile}": 1',
        f'environment: {{"{hostile}": x}}',
        f'inputs: [{{"{hostile}": x}}]',
        f'isolation: "{hostile}"',
        f'scratch: {{size: "{hostile}"}}',
    ):
        with pytest.raises(ManifestError) as caught:
            parse_manifest(f"{HEAD}{text}\n", "m\x1b.yaml")
        for word in (*(p.message + p.remedy for p in caught.value.problems), caught.value.message):
            assert word.replace("\n", "").isprintable(), word


def test_a_character_that_yaml_forbids_has_its_place() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(HEAD + "inputs: [a\x00b]\n")
    assert [(p.line, p.column) for p in caught.value.problems] == [(3, 11)]
    assert "U+0000" in caught.value.message


def test_opening_never_waits_and_never_touches_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "to-device").symlink_to("/dev/tty")
    (tmp_path / "to-zero").symlink_to("/dev/zero")
    start = time.monotonic()
    for name in ("fifo", "to-fifo", "to-device", "to-zero"):
        with pytest.raises(ManifestError, match="not a regular file"):
            load_manifest(tmp_path / name)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "text",
    ["[" * 500_000, "a: " * 100_000, "- " * 200_000, "{a: " * 100_000, "? " * 200_000, "'" + "a\n" * 300_000,
     "\n".join(f"k{n}: 1" for n in range(60_000)), "#" * (1 << 20), "a" * 1_000_000 + ": 1"],
    ids=lambda text: text[:8].replace("\n", " "),
)  # fmt: skip
def test_large_files_end_soon(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ManifestError):
        parse_manifest(text)
    assert time.process_time() - start < 15

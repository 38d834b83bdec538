"""Drafts a manifest from a notebook's code and, if it ran, from what was blocked. A draft grants nothing."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import UsageError
from ..ledger.events import Event, escape
from .model import DEFAULT_TYPES

_WRITERS = {
    "to_csv": "csv", "to_excel": "xlsx", "to_parquet": "parquet", "to_json": "json", "to_markdown": "md",
    "savefig": "png", "save": "", "write_csv": "csv", "write_parquet": "parquet", "write_excel": "xlsx",
    "write_text": "txt", "write_bytes": "", "ExcelWriter": "xlsx", "imsave": "png",
}  # fmt: skip
_SUFFIXES = {f".{name}": name for name in DEFAULT_TYPES} | {".jpg": "jpeg", ".ndjson": "jsonl"}
_PRIVATE = re.compile(
    r"(^|/)\.|/(etc|proc|sys|dev|run|root)/|shadow|passwd|credential|secret|token|id_rsa", re.I
)
_MOST_PATH = 300


def draft_manifest(notebook: Path, events: Iterable[Event] = ()) -> str:
    """YAML text of a manifest for `notebook`, with comments that say where each line came from.

    Args:
        notebook: the notebook; only its code cells are read.
        events: blocked accesses of a run on the baseline.

    Raises:
        UsageError: the notebook cannot be read.
    """
    code = list(_code(notebook))
    folder = Path(os.path.realpath(notebook)).parent
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for number, source in code:
        for path, writes in _paths(source):
            if writes:
                outputs.setdefault(path, f"cell {number + 1}")
            elif name := _input_name(path, folder):
                inputs.setdefault(name, f"cell {number + 1}")
    for event in events:
        if (
            event.event_class == "not-granted"
            and not event.sensitive
            and (name := _input_name(event.target, folder))
        ):
            inputs.setdefault(name, "was blocked in a run")
    for path in outputs:
        inputs.pop(path, None)
    return _text(notebook, inputs, outputs)


def _code(notebook: Path) -> Iterator[tuple[int, str]]:
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                source = cell["source"]
                yield number, source if isinstance(source, str) else "".join(source)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{escape(str(notebook))} cannot be read as a notebook.", "Open it in Jupyter."
        ) from error


def _paths(source: str) -> Iterator[tuple[str, bool]]:
    """Every string literal that looks like a path, and whether it is written to."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    written: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _writes(node):
            for argument in [*node.args[:1], *(k.value for k in node.keywords if k.arg in ("path", "fname"))]:
                written.update(id(part) for part in ast.walk(argument))
            if isinstance(node.func, ast.Attribute):
                written.update(id(part) for part in ast.walk(node.func.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if 0 < len(text) <= _MOST_PATH and text.isprintable() and not text.isspace():
                yield text, id(node) in written


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _WRITERS:
        return True
    if name != "open":
        return False
    modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(
        isinstance(m, ast.Constant) and isinstance(m.value, str) and set(m.value) & set("wax+") for m in modes
    )


def _input_name(path: str, folder: Path) -> str | None:
    """How an existing path is written in a manifest; None for what is not there or is private."""
    full = os.path.normpath(os.path.join(folder, path))
    if _PRIVATE.search(full[len(str(folder)) :] if full.startswith(f"{folder}/") else full):
        return None
    if full in (str(folder), "/") or str(folder).startswith(full + "/") or not os.path.exists(full):
        return None
    if full.startswith(("/usr/", "/bin/", "/lib", "/tmp/")) and not full.startswith(f"{folder}/"):  # noqa: S108
        return None
    return os.path.relpath(full, folder) if full.startswith(f"{folder}/") else full


def _text(notebook: Path, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", notebook.stem).strip("-._") or "notebook"
    lines = [
        "# Drafted from the notebook's code; it grants nothing until you approve it:",
        f"#   jupyter glovebox approve {escape(notebook.name)}",
        "version: 1",
        f"name: {json.dumps(name[:100])}",
        "",
    ]
    if inputs:
        lines += ["# Files and folders it may read.", "inputs:"]
        lines += [
            f"  - {json.dumps(path, ensure_ascii=False)}  # {why}" for path, why in sorted(inputs.items())
        ]
    else:
        lines += ["# The code names no existing file; add what it may read.", "inputs: []"]
    folders = {
        os.path.normpath(path).split("/")[0] for path in outputs if "/" in path and path[0] not in "/."
    }
    place = folders.pop() if len(folders) == 1 else "outputs" if folders or not outputs else "."
    types = sorted(
        {_SUFFIXES[s] for path in outputs if (s := os.path.splitext(path)[1].lower()) in _SUFFIXES}
    )
    lines += ["", "# Results: checked, then copied to this folder beside the notebook."]
    if outputs:
        lines += [f"#   {escape(path)} ({why})" for path, why in sorted(outputs.items())[:20]]
    if types:
        lines.append(f"outputs: {{path: {json.dumps(place)}, types: [{', '.join(types)}]}}")
    else:
        lines.append(f"outputs: {{path: {json.dumps(place)}}}")
    lines += ["", "network: []  # none", "budgets: {memory: 2G, cpu_time: 30m, wall_time: 2h}", ""]
    return "\n".join(lines)

"""Drafts a manifest from a notebook's code and, if it ran, from what was blocked. A draft grants nothing."""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import stat
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import UsageError
from ..ledger.events import Event, escape
from .inputs import below
from .model import Policy
from .plan import TYPES
from .policy import current_policy, policy_for

_WRITERS = frozenset(
    ("to_csv", "to_excel", "to_parquet", "to_json", "to_html", "to_markdown", "to_feather", "to_hdf", "to_pickle",
     "savefig", "save", "savez", "savetxt", "imsave", "ExcelWriter", "write_csv", "write_parquet", "write_excel",
     "write_json", "write_ndjson", "write_html", "write_image", "write_text", "write_bytes", "write_table",
     "save_file", "save_npz")
)  # fmt: skip
# Where a writer's first argument is not the file: the object it is called on is.
_ON_ITSELF = frozenset(("write_text", "write_bytes"))
_SUFFIXES = {f".{name}": name for name in TYPES} | {
    ".jpg": "jpeg", ".ndjson": "jsonl", ".htm": "html", ".h5": "hdf5", ".db": "sqlite", ".yml": "yaml",
    ".feather": "arrow",
}  # fmt: skip
_PRIVATE = re.compile(
    r"(^|/)\.[^/]|^/(etc|proc|sys|dev|run|root)(/|$)|shadow|passwd|password|credential|secret|token|id_(rsa|dsa|ecdsa|ed25519)",
    re.I,
)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/tmp", "/var/tmp", "/boot")  # noqa: S108
_MOST_PATH = 300
_MOST_NOTEBOOK = 256 << 20
_MOST_INPUTS = 100


def draft_manifest(notebook: Path, events: Iterable[Event] = (), *, policy: Policy | None = None) -> str:
    """YAML text of a manifest for `notebook`, with comments that say where each line came from.

    It loads and compiles: it names only what exists, and no more than policy allows.

    Args:
        notebook: the notebook; only its code cells are read.
        events: blocked accesses of a run on the baseline.
        policy: the ceiling; default: the one in force.

    Raises:
        UsageError: the notebook cannot be read.
        ManifestError, RefusedError: the policy cannot be used.
    """
    real = os.path.realpath(notebook)
    folder = os.path.dirname(real)
    policy = policy_for(current_policy(), real) if policy is None else policy
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for number, source in _code(notebook):
        for path, writes in _paths(source):
            if not writes:
                _add_input(inputs, path, folder, f"cell {number + 1}")
            elif name := _output_name(path, folder):
                outputs.setdefault(name, f"cell {number + 1}")
    for event in events:
        if event.event_class == "not-granted" and not event.sensitive:
            _add_input(inputs, event.target, folder, "was blocked in a run")
    place = _place(outputs, inputs)
    inputs = {
        path: why for path, why in inputs.items() if _stays(path, inputs, outputs, place, folder, policy)
    }
    return _text(notebook, inputs, outputs, place, policy)


def _code(notebook: Path) -> Iterator[tuple[int, str]]:
    try:
        fd = os.open(notebook, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_NOTEBOOK:
                raise ValueError("not a file of a notebook's size")
            cells = json.loads(file.read().decode("utf-8"))["cells"]
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                source = cell["source"]
                yield number, source if isinstance(source, str) else "".join(source)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{escape(str(notebook))} cannot be read as a notebook.", "Open it in Jupyter."
        ) from error


def _python(source: str) -> str:
    """The cell without IPython's own syntax: magics, shell commands, questions."""
    lines = []
    for line in source.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        bare = line.strip()
        if bare.startswith(("%", "!", "?")) or bare.endswith("?"):
            line = f"{indent}pass"
        elif found := re.match(r"([\w.,\s]+=\s*)[%!]", line):
            line = f"{found[1]}None"
        lines.append(line)
    return "\n".join(lines)


def _paths(source: str) -> Iterator[tuple[str, bool]]:
    """Every string literal that can be a path, and whether it is written to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notebook's own, such as invalid escapes
            tree = ast.parse(_python(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    written: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for target in _targets(node):
                written.update(id(part) for part in ast.walk(target))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if 0 < len(text) <= _MOST_PATH and text.isprintable() and not text.isspace():
                yield text, id(node) in written


def _targets(call: ast.Call) -> Iterator[ast.expr]:
    """The expressions that name the file a call writes."""
    attribute = call.func if isinstance(call.func, ast.Attribute) else None
    name = attribute.attr if attribute else getattr(call.func, "id", "")
    modes = [*call.args[0 if attribute else 1 :], *(k.value for k in call.keywords if k.arg == "mode")]
    opens = name == "open" and any(
        isinstance(m, ast.Constant)
        and isinstance(m.value, str)
        and re.fullmatch(r"[rbt]*[wax+][rwaxbt+]*", m.value)
        for m in modes
    )
    if not opens and name not in _WRITERS:
        return
    if attribute and (opens or name in _ON_ITSELF):
        yield attribute.value  # Path("out.txt").open("w"), Path("out.txt").write_text(...)
    if name not in _ON_ITSELF:
        yield from call.args[:1]
        yield from (k.value for k in call.keywords if k.arg in ("path", "fname", "file", "path_or_buf"))


def _add_input(inputs: dict[str, str], path: str, folder: str, why: str) -> None:
    name = _input_name(path, folder)
    if name and len(inputs) < _MOST_INPUTS:
        inputs.setdefault(name, why)


def _input_name(path: str, folder: str) -> str | None:
    """How an existing file or folder is written in a manifest; None for what is not there or is private."""
    full = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
    try:
        real = os.path.realpath(full)
        mode = os.stat(full).st_mode
        full.encode()
    except (OSError, ValueError):
        return None
    inside = below(full, folder)
    if full == folder or below(folder, full) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None
    for name in (full, real):
        if _PRIVATE.search(name[len(folder) + 1 :] if below(name, folder) else name):
            return None
        if not below(name, folder) and any(below(name, place) for place in _SYSTEM):
            return None
    return os.path.relpath(full, folder) if inside else full


def _output_name(path: str, folder: str) -> str | None:
    """A written path relative to the notebook's folder; None for URLs and what lies elsewhere."""
    if "://" in path or path.startswith("~"):
        return None
    full = os.path.normpath(os.path.join(folder, path))
    return os.path.relpath(full, folder) if below(full, folder) and full != folder else None


def _place(outputs: dict[str, str], inputs: dict[str, str]) -> str:
    """The folder for results: the one that all are written to, unless an input lies in it."""
    if not outputs:
        return "outputs"
    place = posixpath.commonpath([posixpath.dirname(path) for path in outputs]) or "."
    parts = place.split("/")
    if len(parts) > 6 or any(part.startswith(".") for part in parts):
        return "."
    # Reading back what was written is no input; another file beside it is.
    inside = (path for path in inputs if below(path, place) and path != place and path not in outputs)
    return "." if any(inside) else place


def _stays(
    path: str, inputs: dict[str, str], outputs: dict[str, str], place: str, folder: str, policy: Policy
) -> bool:
    """Whether an input can be granted beside the others and the results."""
    if path in outputs or (place != "." and below(path, place)):
        return False
    if any(path != other and below(path, other) for other in inputs):
        return False
    real = os.path.realpath(os.path.join(folder, path))
    if place != "." and below(real, os.path.realpath(os.path.join(folder, place))):
        return False
    return below(real, folder) or not policy.forbidden_inputs_outside


def _text(notebook: Path, inputs: dict[str, str], outputs: dict[str, str], place: str, policy: Policy) -> str:
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
        lines += [f"  - {_quoted(path)}  # {why}" for path, why in sorted(inputs.items())]
    else:
        lines += ["# The code names no existing file; add what it may read.", "inputs: []"]
    lines += ["", "# Results: checked, then copied to this folder beside the notebook."]
    lines += [f"#   {escape(path)} ({why})" for path, why in sorted(outputs.items())[:20]]
    found = [posixpath.splitext(path)[1].lower() for path in outputs]
    types = sorted({_SUFFIXES[s] for s in found if s in _SUFFIXES} & set(policy.outputs.types))
    lines.append(
        f"outputs: {{path: {_quoted(place)}, types: [{', '.join(types)}]}}"
        if types
        else f"outputs: {{path: {_quoted(place)}}}"
    )
    return "\n".join([*lines, "", "network: []  # none", ""])


def _quoted(path: str) -> str:
    return json.dumps(path, ensure_ascii=False)

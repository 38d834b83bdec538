"""The floors of the design, held by reading every import; and what may lie at the top of the repository."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "provisioner" / "jupyter_glovebox"
NAME = "jupyter_glovebox"

# Lowest first. A room imports from floors below its own; on the floors in `_PEERS`, from its neighbours
# only as said there.
FLOORS = (
    ("", "errors", "locations"),
    ("manifest", "ledger"),
    ("sandbox", "limits", "gateway", "broker", "artifacts"),
    ("supervisor",),
    ("grants", "provisioner", "server", "cli", "__main__"),
)
JUPYTER = (
    "jupyter", "jupyter_client", "jupyter_core", "jupyter_server", "nbformat", "nbclient", "traitlets",
    "ipykernel",
)  # fmt: skip
TOP_LEVEL = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "binder",
    "docs", "labextension", "manifests", "provisioner", "pyproject.toml", "tests",
}  # fmt: skip
TEST_FOLDERS = {
    "unit", "kernel", "escape", "gateway", "artifacts", "server", "browser", "hub", "vm", "benchmarks",
}  # fmt: skip


def modules(package: Path) -> dict[str, Path]:
    """Every module of the package: dotted name without the package's own (`""` for its `__init__`) to file."""
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(module: str, file: Path, known: set[str]) -> tuple[set[str], set[str]]:
    """What a module imports, at any depth of its code: modules of the package, and other top-level names."""
    package = module.split(".") if file.name == "__init__.py" and module else module.split(".")[:-1]
    own: set[str] = set()
    others: set[str] = set()

    def note(base: list[str], names: list[str]) -> None:
        for name in names:
            whole = ".".join([*base, name])
            own.add(whole if whole in known else ".".join(base))

    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == NAME:
                    own.add(".".join(rest))
                else:
                    others.add(first)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            names = [alias.name for alias in node.names]
            if node.level:
                note([*package[: len(package) - node.level + 1], *parts], names)
            elif parts[0] == NAME:
                note(parts[1:], names)
            else:
                others.add(parts[0])
    return own, others


def room(module: str) -> str:
    return module.split(".")[0]


def floor(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(module) in rooms)


def violations(package: Path) -> list[str]:
    """Every import that breaks a rule, in words."""
    found = []
    known = modules(package)
    for module, file in sorted(known.items()):
        own, others = imports(module, file, set(known))
        here = floor(module)
        for target in sorted(own):
            if target not in known:
                found.append(f"{module} imports {target}, which does not exist")
            elif floor(target) > here:
                found.append(f"{module} imports up: {target}")
            elif here == 2 and floor(target) == 2 and room(target) != room(module):
                if target != f"{room(target)}.base":
                    found.append(f"{module} looks into another room: {target}")
            elif here == 2 and room(target) == "manifest" and target != "manifest.plan":
                found.append(f"{module} knows more of manifests than the plan: {target}")
        if here <= 3:
            found += [f"{module} knows Jupyter: {name}" for name in sorted(others) if name in JUPYTER]
    return found


def rooms_graph(package: Path) -> dict[str, set[str]]:
    known = modules(package)
    graph: dict[str, set[str]] = {}
    for module, file in known.items():
        own, _ = imports(module, file, set(known))
        graph.setdefault(room(module), set()).update(room(target) for target in own)
    # The package's own __init__ holds the version and imports nothing: every room may read it.
    return {name: targets - {name, ""} for name, targets in graph.items()}


def test_every_module_lies_on_a_floor() -> None:
    homeless = [m for m in modules(PACKAGE) if not any(room(m) in rooms for rooms in FLOORS)]
    assert homeless == []


def test_no_import_goes_up_or_sideways() -> None:
    assert violations(PACKAGE) == []


def test_no_import_cycle_between_rooms() -> None:
    list(graphlib.TopologicalSorter(rooms_graph(PACKAGE)).static_order())  # raises CycleError


def test_the_package_itself_imports_nothing() -> None:
    own, others = imports("", PACKAGE / "__init__.py", set(modules(PACKAGE)))
    assert (own, others - {"__future__"}) == (set(), set())


def _tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        (target.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    return folder


def test_the_rules_find_what_breaks_them(tmp_path: Path) -> None:
    package = _tree(
        tmp_path / NAME,
        {
            "manifest/plan.py": "def late():\n    from ..sandbox.base import Bind\n",
            "manifest/model.py": "",
            "sandbox/base.py": "import jupyter_client.manager\n",
            "sandbox/mounts.py": "from ..limits.cgroup import Group\nfrom ..limits import base\n",
            "limits/base.py": "from jupyter_glovebox.manifest import model, plan\n",
            "limits/cgroup.py": "from .. import supervisor\nimport jupyter_glovebox.supervisor.main\n",
            "supervisor/main.py": "from ..sandbox import mounts\nfrom .nowhere import it\n",
        },
    )
    assert violations(package) == [
        "limits.base knows more of manifests than the plan: manifest.model",
        "limits.cgroup imports up: supervisor",
        "limits.cgroup imports up: supervisor.main",
        "manifest.plan imports up: sandbox.base",
        "sandbox.base knows Jupyter: jupyter_client",
        "sandbox.mounts looks into another room: limits.cgroup",
        "supervisor.main imports supervisor.nowhere, which does not exist",
    ]
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(rooms_graph(package)).static_order())


def test_only_known_things_lie_at_the_top() -> None:
    patterns = [line.strip("/ ") for line in (REPOSITORY / ".gitignore").read_text().splitlines() if line]
    unknown = {
        entry.name
        for entry in REPOSITORY.iterdir()
        if entry.name not in TOP_LEVEL | {".git"}
        and not any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns)
    }
    assert unknown == set()


def test_only_known_test_folders() -> None:
    found = {entry.name for entry in (REPOSITORY / "tests").iterdir() if entry.is_dir()} - {"__pycache__"}
    assert found <= TEST_FOLDERS

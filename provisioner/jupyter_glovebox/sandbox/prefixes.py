"""What an installation folder (a prefix) is, and which part of it belongs to the environment.

A prefix is mounted whole only when nothing else lies in it. Otherwise (a venv made in the project's own
folder, conda's base with its `envs` and `pkgs`) just the entries that an installation has are mounted.

Sources: PEP 405 (pyvenv.cfg), Python's getpath.py, conda's documentation of environments.
"""

from __future__ import annotations

import os
import re
from typing import Literal

from ..ledger.events import escape
from .base import SandboxError
from .sensitive import all_homes, sensitive, sensitive_places

Kind = Literal["venv", "conda", "python", "program"]

_STANDARD = frozenset(
    ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "share", "etc", "man", "doc",
     "pyvenv.cfg", "BUILD", "conda-meta", "condabin", "compiler_compat", "shell", "ssl", "mkspecs", "plugins",
     "qml", "phrasebooks", "resources", "translations", "fonts", "jre", "opt", "python-scripts", "sysroot",
     "targets", "nvvm", "extras", "cmake", "rsc", "libdata", "modules", "metatypes", "icu", "site-packages")
)  # fmt: skip
# Small files of tools; leaving them out needs no split.
_HARMLESS = frozenset(
    (".gitignore", "CACHEDIR.TAG", ".lock", ".Python", "LICENSE", "LICENSE.txt", "LICENSE.md",
     "README.md", "NEWS", "COPYING", "pip-selfcheck.json", ".nonadmin", ".messages")
)  # fmt: skip
_TRIPLET = re.compile(r"(x86_64|aarch64)-[\w.-]*linux-gnu\w*")
_PYTHON_LIB = re.compile(r"python[23]\.\d+t?")


def kind_of(prefix: str) -> Kind | None:
    """What an absolute folder is; None when it is no installation of a known shape."""
    if os.path.isfile(f"{prefix}/pyvenv.cfg"):
        return "venv"
    if os.path.isdir(f"{prefix}/conda-meta"):
        return "conda"
    if python_libraries(prefix):
        return "python"
    if any(os.path.isdir(f"{prefix}/{name}") for name in ("lib", "lib64", "libexec", "share")):
        return "program"
    return None


def python_libraries(prefix: str) -> list[str]:
    """The `pythonX.Y` library folders of a prefix, absolute."""
    found = []
    for lib in ("lib", "lib64"):
        folder = f"{prefix}/{lib}"
        if os.path.islink(folder):
            continue
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        found += [f"{folder}/{name}" for name in names if _PYTHON_LIB.fullmatch(name)]
    return sorted(found)


def is_shared(prefix: str, homes: tuple[str, ...]) -> bool:
    """Whether a folder is a common place for many programs (`~/.local`, `/opt`), never one installation."""
    return prefix.count("/") < 2 or prefix in homes or any(prefix == f"{home}/.local" for home in homes)


def parts(prefix: str) -> tuple[list[str], list[str]]:
    """What to mount of a prefix that is an installation of its own (absolute, real path).

    The settings (`etc`) of a program that is neither Python nor conda stay out: a service keeps its
    secrets there.

    Returns:
        The paths to mount (just the prefix when it is mounted whole), and the names left out.
    """
    with os.scandir(prefix) as entries:
        names = sorted(entry.name for entry in entries)
    known = _STANDARD - {"etc"} if kind_of(prefix) == "program" else _STANDARD
    belongs = [name for name in names if name in known or _TRIPLET.fullmatch(name)]
    foreign = [name for name in names if name not in belongs and name not in _HARMLESS]
    if not foreign:
        return [prefix], []
    return [f"{prefix}/{name}" for name in belongs], foreign


def python_parts(executable: str) -> list[str]:
    """What a Python in a shared prefix needs: its library folder, its shared library, itself."""
    prefix = os.path.dirname(os.path.dirname(executable))
    match = re.search(r"\d+\.\d+t?", os.path.basename(executable))
    found = [executable]
    for folder in python_libraries(prefix):
        if match is None or os.path.basename(folder) == f"python{match[0]}":
            found.append(folder)
            lib = os.path.dirname(folder)
            stem = f"lib{os.path.basename(folder)}"
            found += [f"{lib}/{n}" for n in os.listdir(lib) if n.startswith(stem) and ".so" in n]
    return found


def refuse_dangerous(prefix: str, homes: tuple[str, ...] | None = None) -> None:
    """Refuse to mount a prefix that is, or holds, what must never be mounted.

    Args:
        prefix: absolute real path.
        homes: home folders; None asks `all_homes`.

    Raises:
        SandboxError: `validation`.
    """
    homes = all_homes() if homes is None else homes
    remedy = "Make the environment in a folder of its own, and register its kernel again."
    name = escape(prefix)
    if prefix == "/" or prefix in homes:
        what = "the whole file system" if prefix == "/" else "a home folder"
        raise SandboxError("validation", f"The kernel's environment {name} is {what}.", remedy)
    if reason := sensitive(prefix, homes):
        raise SandboxError("validation", f"The kernel's environment {name} lies where {reason} are.", remedy)
    inside = prefix + "/"
    for home in homes:
        if home.startswith(inside):
            raise SandboxError(
                "validation", f"The kernel's environment {name} holds the home {escape(home)}.", remedy
            )
    own = [os.environ.get(f"JUPYTER_GLOVEBOX_{part}_DIR", "") for part in ("STATE", "CONFIG", "RUNTIME")]
    places = [(os.path.realpath(place), "this program's own state") for place in own if place]
    for place, reason in places + sensitive_places(homes):
        if place.startswith(inside) and os.path.lexists(place):
            raise SandboxError(
                "validation", f"The kernel's environment {name} holds {reason} ({escape(place)}).", remedy
            )

"""Which program stands behind a version manager's shim.

A shim is a script that chooses a version when it runs; it needs the whole version manager, which lies in
a home. The choice is made here instead, by the rules of pyenv's README ("Understanding Python version
selection"): PYENV_VERSION, `.python-version` in the folder and those above it, the global version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..ledger.events import escape
from .base import SandboxError

_VERSION = re.compile(r"[\w.+@/-]+")


def real_program(shim: str, env: Mapping[str, str], cwd: str) -> str:
    """The absolute name of the program that `ROOT/shims/NAME` would start.

    Args:
        shim: absolute name of the shim.
        env: its variables (PYENV_VERSION, PATH).
        cwd: the folder it would start in.

    Raises:
        FileNotFoundError: no chosen version has the program.
        SandboxError: `validation`, when the shim is not pyenv's.
    """
    folder, name = os.path.split(shim)
    root = os.path.dirname(folder)
    if not os.path.isdir(f"{root}/versions") or not _is_pyenv(shim):
        raise SandboxError(
            "validation",
            f"{escape(shim)} is a version manager's shim, which chooses its program only when it runs.",
            f"Name the program itself in the kernelspec (asdf which {escape(name)}, mise which {escape(name)}).",
        )
    for version in _versions(root, env, cwd):
        if version == "system":
            for place in env.get("PATH", os.defpath).split(":"):
                candidate = f"{place}/{name}"
                if place.startswith("/") and place != folder and os.access(candidate, os.X_OK):
                    return candidate
        candidate = f"{root}/versions/{version}/bin/{name}"
        if os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError(2, "No pyenv version that is selected here has this program", shim)


def _is_pyenv(shim: str) -> bool:
    try:
        with open(shim, "rb") as file:
            return b"pyenv" in file.read(4096)
    except OSError:
        return False


def _versions(root: str, env: Mapping[str, str], cwd: str) -> list[str]:
    """The versions selected, in order, as names below `versions`."""
    chosen = env.get("PYENV_VERSION", "").split(":") if env.get("PYENV_VERSION") else []
    folder = cwd
    while not chosen and folder:
        chosen = _read(f"{folder}/.python-version")
        folder = "" if folder == "/" else os.path.dirname(folder)
    chosen = chosen or _read(f"{root}/version") or ["system"]
    return [
        _installed(root, version) for version in chosen if _VERSION.fullmatch(version) and ".." not in version
    ]


def _read(path: str) -> list[str]:
    try:
        with open(path) as file:
            return [word for line in file.read(4096).splitlines() for word in line.partition("#")[0].split()]
    except (OSError, UnicodeDecodeError):
        return []


def _installed(root: str, version: str) -> str:
    """`3.11` means the newest 3.11.x that is installed."""
    version = version.removeprefix("python-")
    if version == "system" or os.path.isdir(f"{root}/versions/{version}"):
        return version
    try:
        known = [name for name in os.listdir(f"{root}/versions") if re.fullmatch(r"\d+(\.\d+)*", name)]
    except OSError:
        return version
    fitting = [name for name in known if name.startswith(version + ".")]
    return max(fitting, key=lambda name: [int(part) for part in name.split(".")], default=version)

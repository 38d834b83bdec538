"""Kinds of names in manifests and policies: paths inside and outside, variables.

They judge the text alone, so that a mistake shows before any file exists; what a path leads to is judged
when a plan is compiled.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Any

from .fields import INVALID, Text

_DEEPEST_OUTPUTS = 6
# What the sandbox sets itself, or what makes a program load code before the first cell.
_OWN_VARIABLES = (
    "HOME|PATH|USER|LOGNAME|SHELL|TMPDIR|PWD|OLDPWD|IFS|ENV|BASH_ENV|PYTHONPATH|PYTHONHOME|PYTHONSTARTUP|"
    "PYTHONUSERBASE|PYTHONINSPECT|PYTHONEXECUTABLE|PYTHONPLATLIBDIR|GLIBC_TUNABLES|XDG_RUNTIME_DIR|"
    "LD_.*|JPY_.*|JUPYTER.*|GIT_CONFIG.*|BASH_FUNC_.*"
)


@dataclass(frozen=True)
class InputPath(Text):
    """A file, folder or pattern to read: absolute, or below the notebook's folder."""

    words: str = "a path below the notebook's folder, or an absolute one"

    def scalar(self, text: str, *, plain: bool) -> Any:
        return INVALID if _leaves(text) else super().scalar(text, plain=plain)

    def remedy(self, text: str) -> str:
        return "Name what lies elsewhere by its absolute path, without `..`." if _leaves(text) else ""

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "not": {"pattern": r"^\.\.(/|$)"}}


def _leaves(text: str) -> bool:
    if text.startswith("/"):
        return ".." in text.split("/")
    return posixpath.normpath(text).split("/")[0] == ".."


@dataclass(frozen=True)
class OutputPath(Text):
    """The folder for results, below the notebook's folder; `.` is that folder itself.

    Names that begin with a dot are refused: files put into `.git` or `.ipython` would be run.
    """

    words: str = "a folder below the notebook's folder (no name in it begins with a dot), or `.`"

    def scalar(self, text: str, *, plain: bool) -> Any:
        if super().scalar(text, plain=plain) is INVALID or text.startswith("/"):
            return INVALID
        path = posixpath.normpath(text)
        if path == ".":
            return path
        parts = path.split("/")
        return INVALID if len(parts) > _DEEPEST_OUTPUTS or any(p.startswith(".") for p in parts) else path

    def remedy(self, text: str) -> str:
        return "Write `outputs`, for example."

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "pattern": r"^(?!/)(?!(.*/)?\.[^/])"}


@dataclass(frozen=True)
class AbsolutePath(Text):
    """An absolute path in a policy; with `pattern` also with `*` and `**`."""

    words: str = "an absolute path without `..`"

    def scalar(self, text: str, *, plain: bool) -> Any:
        if super().scalar(text, plain=plain) is INVALID or not text.startswith("/") or _leaves(text):
            return INVALID
        return "/" + posixpath.normpath(text).lstrip("/")

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "pattern": "^/"}


@dataclass(frozen=True)
class VariableName(Text):
    """The name of an environment variable that a manifest may set."""

    words: str = "a variable's name, and none that the sandbox sets itself or that loads code (PATH, LD_…)"
    pattern: str = "[A-Za-z_][A-Za-z0-9_]{0,99}"

    def scalar(self, text: str, *, plain: bool) -> Any:
        return INVALID if re.fullmatch(_OWN_VARIABLES, text) else super().scalar(text, plain=plain)

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "not": {"pattern": f"^(?:{_OWN_VARIABLES})$"}}

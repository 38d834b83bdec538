"""Resolves the inputs of a manifest: names and patterns to real paths, with the identity of each."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from typing import Literal, NoReturn

import msgspec

from ..errors import RefusedError
from ..ledger.events import escape
from .fields import Problem
from .loading import ManifestError
from .model import Manifest, ManifestInput, Policy
from .plan import InputGrant, Outputs, SourceIdentity

_MOST_INPUTS = 1000
_MOST_LOOKED_AT = 100_000
_MAGIC = frozenset("*?[")
_APPROVE = "Look at it, then approve the notebook again: jupyter glovebox approve NOTEBOOK"


def below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it, by name."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class Inputs:
    """Resolves once; what is found is compared with `approved`, where each name led when it was approved."""

    def __init__(
        self,
        manifest: Manifest,
        workdir: str,
        outputs: Outputs | None,
        policy: Policy,
        approved: dict[str, str] | None,
    ) -> None:
        self._manifest = manifest
        self._workdir = workdir
        self._outputs = (
            None if outputs is None or outputs.path == "." else os.path.join(workdir, outputs.path)
        )
        self._policy = policy
        self._approved = approved
        self._found: dict[str, InputGrant] = {}

    def grants(self) -> tuple[InputGrant, ...]:
        """Every input, sorted by its name inside.

        Raises:
            ManifestError: an input is missing, not a file or folder, or where policy allows none.
            RefusedError: an input leads elsewhere than when it was approved.
        """
        for number, entry in enumerate(self._manifest.inputs):
            path = os.path.normpath(os.path.join(self._workdir, entry.path))
            path = "/" + path.lstrip("/")  # POSIX keeps two leading slashes
            if path == self._workdir:
                self._several(self._whole_folder(number), self._workdir, entry, number)
            elif _MAGIC & set(entry.path) and not os.path.lexists(path):
                self._pattern(path, entry, number)
            else:
                self._add(path, entry, number)
        return tuple(self._found[path] for path in sorted(self._found))

    def _fail(self, number: int, message: str, remedy: str = "") -> NoReturn:
        places = self._manifest.places
        line, column = places.get(f"inputs[{number}]") or places.get("inputs") or (1, 1)
        raise ManifestError(self._manifest.file or "manifest", [Problem(line, column, message, remedy)])

    def _pattern(self, path: str, entry: ManifestInput, number: int) -> None:
        """Add what a pattern matches now."""
        # Only what the manifest wrote is a pattern; the notebook's folder may have brackets in its name.
        base = "/" if entry.path.startswith("/") else self._workdir
        parts = path[len(base) :].strip("/").split("/")
        while len(parts) > 1 and not _MAGIC & set(parts[0]):
            base = os.path.join(base, parts.pop(0))
        search = _Search()
        try:
            names = sorted(set(search.find(base, parts)))
        except TooManyError:
            self._fail(
                number,
                f"The input {escape(entry.path)} looks through more than {_MOST_LOOKED_AT} files.",
                "Name a folder, or a narrower pattern.",
            )
        if not names:
            self._fail(
                number,
                f"No file matches the input {escape(entry.path)}.",
                "Correct the pattern, or create the file.",
            )
        self._several(names, base, entry, number)

    def _several(self, names: list[str], base: str, entry: ManifestInput, number: int) -> None:
        """Add what a pattern or `.` found below `base`; links that lead nowhere are no files."""
        names = [name for name in names if os.path.exists(name)]
        if len(names) + len(self._found) > _MOST_INPUTS:
            self._fail(
                number,
                f"The input {escape(entry.path)} names more than {_MOST_INPUTS} files.",
                "Put them into a folder and name that.",
            )
        for name in names:
            self._add(name, entry, number, found_in=os.path.realpath(base))

    def _whole_folder(self, number: int) -> list[str]:
        """`.`: every entry of the folder, so that scratch can be its floor."""
        try:
            names = os.listdir(self._workdir)
        except OSError as error:
            self._fail(number, f"The notebook's folder cannot be listed: {error.strerror}.")
        paths = [os.path.join(self._workdir, name) for name in sorted(names) if name != ".ipynb_checkpoints"]
        return [path for path in paths if path != self._outputs]

    def _add(self, path: str, entry: ManifestInput, number: int, *, found_in: str | None = None) -> None:
        shown = escape(path)
        real = os.path.realpath(path)
        try:
            real.encode()
            path.encode()
        except UnicodeEncodeError:
            self._fail(number, f"The name of the input {shown} is not UTF-8.", "Rename the file.")
        try:
            found = os.lstat(real)
        except OSError as error:
            hint = (
                "Write the home folder out."
                if entry.path.startswith("~")
                else "Correct it, or create the file."
            )
            self._fail(number, f"The input {shown} cannot be used: {error.strerror}.", hint)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            self._fail(
                number, f"The input {shown} is neither a file nor a folder.", "Name what the notebook reads."
            )
        kind: Literal["file", "directory"] = "directory" if stat.S_ISDIR(found.st_mode) else "file"
        if entry.sha256 is not None and kind == "directory":
            self._fail(number, f"The input {shown} is a folder and cannot have a sha256.", "Name its files.")
        self._check_place(path, real, number)
        self._check_approved(path, real, found_in)
        grant = InputGrant(
            path=path,
            source=real,
            kind=kind,
            sha256=entry.sha256,
            identity=SourceIdentity(
                device=found.st_dev, inode=found.st_ino, mtime_ns=found.st_mtime_ns, size=found.st_size
            ),
        )
        self._found[path] = self._with_pin(grant, self._found.get(path), number)

    def _check_place(self, path: str, real: str, number: int) -> None:
        if self._outputs is not None and (
            below(path, self._outputs) or below(real, os.path.realpath(self._outputs))
        ):
            self._fail(
                number,
                f"The input {escape(path)} lies in the outputs folder.",
                "Choose another outputs.path.",
            )
        if self._policy.forbidden_inputs_outside and not below(real, self._workdir):
            where = f"The policy {self._policy.file}" if self._policy.file else "The policy"
            leads = "" if real == path else f" (it leads to {escape(real)})"
            self._fail(
                number,
                f"{where} allows no input outside the notebook's folder, as {escape(path)} is{leads}.",
                "Copy the data into the notebook's folder.",
            )

    def _check_approved(self, path: str, real: str, found_in: str | None) -> None:
        """Refuse what leads elsewhere than a person saw. A new file that a pattern matches may be there."""
        if self._approved is None:
            return
        before = self._approved.get(path)
        if before == real or (before is None and found_in is not None and below(real, found_in)):
            return
        was = f"led to {escape(before)}" if before is not None else "was not there"
        raise RefusedError(
            f"The input {escape(path)} {was} when it was approved, and leads to {escape(real)} now.", _APPROVE
        )

    def _with_pin(self, grant: InputGrant, known: InputGrant | None, number: int) -> InputGrant:
        """The same file named twice keeps its pinned digest."""
        if known is None or known.sha256 is None:
            return grant
        if grant.sha256 not in (None, known.sha256):
            self._fail(
                number,
                f"The input {escape(grant.path)} is pinned to two different digests.",
                "Remove one.",
            )
        return msgspec.structs.replace(grant, sha256=known.sha256)


class TooManyError(Exception):
    """A pattern looked at too many names."""


class _Search:
    """Pattern matching that follows no link while it descends (a link can lead round in a circle).

    `*`, `?` and `[…]` match within one name, `**` any number of folders; names that begin with a dot
    only match a pattern that begins with one.
    """

    def __init__(self) -> None:
        self._left = _MOST_LOOKED_AT

    def find(self, folder: str, parts: list[str]) -> Iterator[str]:
        """Paths below `folder` that match. Raises TooManyError."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            # `a/**/**/b` is `a/**/b`, and would only repeat itself.
            while rest and rest[0] == "**":
                rest = rest[1:]
            for below_it in self._folders(folder):
                yield from self.find(below_it, rest or ["*"])
            return
        if not _MAGIC & set(part):
            path = os.path.join(folder, part)
            if rest:
                yield from self.find(path, rest)
            elif os.path.lexists(path):
                yield path
            return
        for entry in self._entries(folder):
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            if not fnmatch.fnmatchcase(entry.name, part):
                continue
            if not rest:
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from self.find(entry.path, rest)

    def _folders(self, folder: str) -> Iterator[str]:
        waiting = [folder]
        while waiting:
            folder = waiting.pop()
            yield folder
            waiting += [
                entry.path
                for entry in self._entries(folder)
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError:
            return []  # not a folder, or not ours to read: nothing in it matches
        self._left -= len(found)
        if self._left < 0:
            raise TooManyError
        return found

"""Reads manifests and policies from YAML. Raises nothing but its own error, with every problem's place.

Files are opened so that nothing can hang or overflow: regular files of at most 1 MiB, no links for a
policy, no anchors, aliases, tags or further documents, bounded depth.

Source: YAML 1.2.2; PyYAML composes the nodes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError
from ..ledger.events import escape
from .fields import INVALID, Problem, Reader, Section
from .model import MANIFEST, POLICY, Manifest, Policy, manifest_from, policy_from

_MOST_BYTES = 1 << 20
_MOST_DEPTH = 20
_MOST_NODES = 50_000


class ManifestError(UsageError):
    """A manifest or policy that cannot be used.

    Attributes:
        file: its name.
        problems: everything that is wrong, in the file's order.
    """

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = problems
        lines = [
            f"{escape(file)}{f':{p.line}:{p.column}' if p.line else ''}: {escape(p.message)}"
            + (f" {escape(p.remedy)}" if p.remedy else "")
            for p in problems[:20]
        ]
        if len(problems) > 20:
            lines.append(f"and {len(problems) - 20} more")
        super().__init__("\n  ".join(lines), "See docs/manifest.md, or run: jupyter glovebox check FILE")


def load_manifest(path: Path | str) -> Manifest:
    """Read a manifest.

    Raises:
        ManifestError: it cannot be read or is not valid.
    """
    return parse_manifest(_read(Path(path), follow=True), str(path))


def load_policy(path: Path | str, *, managed: bool = False) -> Policy:
    """Read a policy; a managed one must not be a link, and `denials` is `uniform` unless it says otherwise.

    Raises:
        ManifestError: it cannot be read or is not valid.
    """
    return parse_policy(_read(Path(path), follow=not managed), str(path), managed=managed)


def parse_manifest(text: bytes | str, file: str = "manifest") -> Manifest:
    """As `load_manifest`, from text."""
    values, reader = _parse(text, file, MANIFEST)
    return manifest_from(values, reader.places, file)


def parse_policy(text: bytes | str, file: str = "policy", *, managed: bool = False) -> Policy:
    """As `load_policy`, from text."""
    return policy_from(_parse(text, file, POLICY)[0], file, managed=managed)


def _fail(file: str, message: str, remedy: str = "", line: int = 0, column: int = 0) -> ManifestError:
    return ManifestError(file, [Problem(line, column, message, remedy)])


def _read(path: Path, *, follow: bool) -> bytes:
    name = str(path)
    try:
        # O_PATH first: opening a device or a FIFO can itself do something, or wait.
        place = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        try:
            mode = os.fstat(place).st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
                raise _fail(name, f"It is {kind}.", "Name a YAML file.")
            fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(place)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _fail(name, f"The file cannot be read: {reason}.", "Check its name and rights.") from error
    with os.fdopen(fd, "rb") as file:
        try:
            text = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise _fail(name, f"The file cannot be read: {error.strerror}.") from error
    if len(text) > _MOST_BYTES:
        raise _fail(name, "The file is larger than 1 MiB.", "A manifest is a page of text.")
    return text


def _parse(raw: bytes | str, file: str, section: Section) -> tuple[dict[str, Any], Reader]:
    if isinstance(raw, str):
        text = raw
    else:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            raise _fail(file, "It is not UTF-8 text.", "Save it as UTF-8.", line, 1) from error
    reader = Reader()
    node = _compose(text.removeprefix("\ufeff"), file)
    if node is None:
        raise _fail(file, "The file is empty.", "Start with `version: 1` and `name: …`.", 1, 1)
    values = section.read(node, reader, "")
    if reader.problems or values is INVALID:
        raise ManifestError(file, sorted(reader.problems, key=lambda p: (p.line, p.column)))
    return values, reader


def _compose(text: str, file: str) -> yaml.Node | None:
    """The document's node, after a look at its events: what could multiply or surprise is refused."""
    try:
        depth = documents = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            mark = event.start_mark
            place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise _fail(
                    file, "Anchors and aliases (& and *) are not allowed.", "Write the value out.", *place
                )
            if getattr(event, "tag", None):
                raise _fail(file, "Tags (!) are not allowed.", "Write plain values.", *place)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _fail(file, "There is more than one document.", "Remove the second `---`.", *place)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH or count > _MOST_NODES:
                raise _fail(file, "It is nested too deeply or has too many values.", "", *place)
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _fail(file, f"This is not YAML: {error.problem or error.context}.", "", *at) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = (before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise _fail(
            file,
            f"There is a character that YAML does not allow (U+{ord(text[error.position]):04X}).",
            "Remove it.",
            *at,
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _fail(file, f"This is not YAML: {str(error).splitlines()[0][:200]}.", "", 1, 1) from error
    return node

"""Kinds of values in manifests and policies: how each is read from YAML, and its JSON Schema.

A kind turns a YAML node into a value, or reports problems with their place. One definition serves the
loader, the JSON Schema and the reference. YAML scalars are read as text and interpreted by the kind that
is expected, so `no`, `1:30` or `0o17` never become something else on the way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*([smh])", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_TEXT = 4096


@dataclass(frozen=True)
class Problem:
    """Something wrong at a place (line and column count from 1; 0 when the whole file is meant)."""

    line: int
    column: int
    message: str
    remedy: str = ""


@dataclass
class Reader:
    """Collects problems and remembers where each key was written (dotted name to line)."""

    problems: list[Problem] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def bad(self, node: yaml.Node, message: str, remedy: str = "") -> None:
        """Report a problem at a node."""
        mark = node.start_mark
        self.problems.append(Problem(mark.line + 1, mark.column + 1, message, remedy))


class Invalid:
    """What a kind returns for a value it could not read; the problem has been reported."""


INVALID = Invalid()


class Kind:
    """One kind of value."""

    words = "a value"

    def read(self, node: yaml.Node, reader: Reader, name: str) -> Any:
        """The value of `node`, or INVALID after reporting why."""
        if not isinstance(node, yaml.ScalarNode):
            reader.bad(node, f"`{name}` must be {self.words}.")
            return INVALID
        value = self.scalar(node.value.strip(), plain=node.style is None)
        if value is INVALID:
            shown = node.value if len(node.value) <= 40 else node.value[:40] + "…"
            reader.bad(node, f"`{name}` must be {self.words}, not {shown!r}.", self.remedy(node.value))
        return value

    def scalar(self, text: str, *, plain: bool) -> Any:
        """The value of a scalar's text, or INVALID."""
        raise AssertionError("every scalar kind has this")

    def remedy(self, text: str) -> str:
        """What to write instead."""
        return ""

    def schema(self) -> dict[str, Any]:
        """JSON Schema 2020-12."""
        return {}


class Size(Kind):
    """Bytes; K, M, G, T are powers of 1024."""

    words = "a size such as 512M or 2G"

    def scalar(self, text: str, *, plain: bool) -> Any:
        found = _SIZE.fullmatch(text)
        if not found or len(text) > 24:
            return INVALID
        value = int(float(found[1]) * _UNITS[found[2]])
        return value if 0 < value < 1 << 60 else INVALID

    def schema(self) -> dict[str, Any]:
        pattern = r"^\d+(\.\d+)?\s*[KMGT]?(i?B)?$"
        return {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "integer", "minimum": 1}]}


class Duration(Kind):
    """Seconds; units s, m, h, d."""

    words = "a time such as 30s, 15m, 2h or 1d"

    def scalar(self, text: str, *, plain: bool) -> Any:
        found = _TIME.fullmatch(text)
        if not found or len(text) > 24:
            return INVALID
        value = float(found[1]) * _SECONDS[found[2]]
        return value if 0 < value <= 366 * 86400 else INVALID

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\d+(\.\d+)?\s*[smhd]$"}


class Rate(Kind):
    """Requests per second; units /s, /m, /h."""

    words = "a rate such as 5/s or 100/m"

    def scalar(self, text: str, *, plain: bool) -> Any:
        found = _RATE.fullmatch(text)
        if not found or len(text) > 24 or float(found[1]) <= 0:
            return INVALID
        return float(found[1]) / _SECONDS[found[2]]

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\d+(\.\d+)?\s*/\s*[smh]$"}


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number in a range."""

    least: int = 1
    most: int = 10**9

    @property
    def words(self) -> str:  # type: ignore[override]
        return f"a whole number from {self.least} to {self.most}"

    def scalar(self, text: str, *, plain: bool) -> Any:
        if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not self.least <= int(text) <= self.most:
            return INVALID
        return int(text)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Number(Kind):
    """A number in a range."""

    least: float
    most: float

    @property
    def words(self) -> str:  # type: ignore[override]
        return f"a number from {self.least:g} to {self.most:g}"

    def scalar(self, text: str, *, plain: bool) -> Any:
        if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text, re.ASCII):
            return INVALID
        return float(text) if self.least <= float(text) <= self.most else INVALID

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.least, "maximum": self.most}


class Truth(Kind):
    """true or false."""

    words = "true or false"

    def scalar(self, text: str, *, plain: bool) -> Any:
        return {"true": True, "false": False}.get(text, INVALID) if plain else INVALID

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text(Kind):
    """Text without control characters, not empty; with `pattern`, matching it whole."""

    words: str = "text"
    pattern: str = ""

    def scalar(self, text: str, *, plain: bool) -> Any:
        if not text or len(text) > _LONGEST_TEXT or (plain and text in ("null", "~")):
            return INVALID
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in text):
            return INVALID
        return text if not self.pattern or re.fullmatch(self.pattern, text, re.ASCII) else INVALID

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        if self.pattern:
            schema["pattern"] = f"^(?:{self.pattern})$"
        return schema


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words."""

    options: tuple[str, ...]

    @property
    def words(self) -> str:  # type: ignore[override]
        return "one of " + ", ".join(self.options)

    def scalar(self, text: str, *, plain: bool) -> Any:
        return text if text in self.options else INVALID

    def remedy(self, text: str) -> str:
        return _nearest(text, self.options)

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.options)}


@dataclass(frozen=True)
class Optional(Kind):
    """A kind, or null."""

    inner: Kind

    def read(self, node: yaml.Node, reader: Reader, name: str) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("null", "~", ""):
            return None
        return self.inner.read(node, reader, name)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.inner.schema(), {"type": "null"}]}


@dataclass(frozen=True)
class ListOf(Kind):
    """A list; an empty one means that nothing is allowed."""

    inner: Kind
    most: int = 1000
    unique: bool = True

    def read(self, node: yaml.Node, reader: Reader, name: str) -> Any:
        if not isinstance(node, yaml.SequenceNode):
            reader.bad(node, f"`{name}` must be a list.", f"Write `{name}: [ … ]`.")
            return INVALID
        if len(node.value) > self.most:
            reader.bad(node, f"`{name}` has more than {self.most} entries.")
            return INVALID
        values = []
        for number, item in enumerate(node.value):
            value = self.inner.read(item, reader, f"{name}[{number}]")
            if value is INVALID:
                continue
            if self.unique and value in values:
                reader.bad(item, f"`{name}` names the same thing twice.", "Remove one.")
            values.append(value)
        return values

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.inner.schema(), "maxItems": self.most}


@dataclass(frozen=True)
class MapOf(Kind):
    """A mapping from free names to one kind."""

    inner: Kind
    key: Text = Text()
    most: int = 200

    def read(self, node: yaml.Node, reader: Reader, name: str) -> Any:
        pairs = _pairs(node, reader, name)
        if pairs is None:
            return INVALID
        if len(pairs) > self.most:
            reader.bad(node, f"`{name}` has more than {self.most} entries.")
            return INVALID
        values = {}
        for key, (key_node, value_node) in pairs.items():
            if self.key.scalar(key, plain=False) is INVALID:
                reader.bad(
                    key_node, f"{key!r} cannot be a name in `{name}`.", f"It must be {self.key.words}."
                )
                continue
            value = self.inner.read(value_node, reader, f"{name}.{key}")
            if value is not INVALID:
                values[key] = value
        return values

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": self.inner.schema(),
            "propertyNames": self.key.schema(),
            "maxProperties": self.most,
        }


class Anything(Kind):
    """Any plain data (scalars, lists, mappings); scalars keep their YAML type."""

    def read(self, node: yaml.Node, reader: Reader, name: str) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, reader, name) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            pairs = _pairs(node, reader, name)
            return {k: self.read(v, reader, f"{name}.{k}") for k, (_, v) in (pairs or {}).items()}
        if not isinstance(node, yaml.ScalarNode):
            return INVALID
        text = node.value
        if node.style is None:
            if text in ("true", "false"):
                return text == "true"
            if text in ("null", "~", ""):
                return None
            if re.fullmatch(r"-?\d{1,15}", text, re.ASCII):
                return int(text)
            if re.fullmatch(r"-?\d{1,15}\.\d{1,15}", text, re.ASCII):
                return float(text)
        return text


@dataclass(frozen=True)
class Key:
    """One key of a section: its kind, its words for the reference, whether it must be there."""

    kind: Kind
    words: str
    example: str = ""
    required: bool = False


@dataclass(frozen=True)
class Section(Kind):
    """A mapping with known keys. `short` reads a bare scalar as the key of that name."""

    keys: Mapping[str, Key]
    short: str = ""

    def read(self, node: yaml.Node, reader: Reader, name: str) -> Any:
        if self.short and isinstance(node, yaml.ScalarNode):
            value = self.keys[self.short].kind.read(node, reader, name)
            return INVALID if value is INVALID else {self.short: value}
        pairs = _pairs(node, reader, name)
        if pairs is None:
            return INVALID
        values: dict[str, Any] = {}
        prefix = f"{name}." if name else ""
        for key, (key_node, value_node) in pairs.items():
            known = self.keys.get(key)
            if known is None:
                allowed = ", ".join(self.keys)
                where = f" in `{name}`" if name else ""
                hint = _nearest(key, self.keys)
                reader.bad(
                    key_node, f"Unknown key `{key[:60]}`{where}.", f"{hint} Allowed keys: {allowed}.".strip()
                )
                continue
            reader.places[f"{prefix}{key}"] = key_node.start_mark.line + 1
            value = known.kind.read(value_node, reader, f"{prefix}{key}")
            if value is not INVALID:
                values[key] = value
        for key, known in self.keys.items():
            if known.required and key not in pairs:
                reader.bad(node, f"The key `{prefix}{key}` is missing.", f"Add `{key}: {known.example}`.")
        return values

    def schema(self) -> dict[str, Any]:
        properties = {
            name: {**key.kind.schema(), "description": key.words} for name, key in self.keys.items()
        }
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required := [name for name, key in self.keys.items() if key.required]:
            schema["required"] = required
        return {"anyOf": [self.keys[self.short].kind.schema(), schema]} if self.short else schema


def _pairs(node: yaml.Node, reader: Reader, name: str) -> dict[str, tuple[yaml.Node, yaml.Node]] | None:
    """The entries of a mapping node by key; duplicate and non-text keys are problems."""
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value == "":
        reader.bad(node, f"`{name}` is empty.", "Write its value, or remove the key.")
        return None
    if not isinstance(node, yaml.MappingNode):
        reader.bad(node, f"{f'`{name}`' if name else 'The file'} must hold `key: value` lines.")
        return None
    pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            reader.bad(key_node, "A key must be text.")
        elif key_node.value in pairs:
            reader.bad(key_node, f"The key `{key_node.value[:60]}` is written twice.", "Keep one of them.")
        else:
            pairs[key_node.value] = (key_node, value_node)
    return pairs


def _nearest(word: str, options: Sequence[str] | Mapping[str, Any]) -> str:
    found = difflib.get_close_matches(word[:60], list(options), n=1)
    return f"Did you mean `{found[0]}`?" if found else ""

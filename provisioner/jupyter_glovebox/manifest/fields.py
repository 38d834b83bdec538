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

from ..ledger.events import escape

# A fraction needs a unit: `1.5` alone is a mistake, not one byte.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?|(\d+)B?", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*([smh])", re.ASCII)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_TEXT = 4096
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class Problem:
    """Something wrong at a place (line and column count from 1; 0 when the whole file is meant).

    Both texts may quote the file; they are safe to print.
    """

    line: int
    column: int
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", escape(self.message))
        object.__setattr__(self, "remedy", escape(self.remedy))


@dataclass
class Reader:
    """Collects problems and remembers where each value was written (dotted name to line and column)."""

    problems: list[Problem] = field(default_factory=list)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def bad(self, node: yaml.Node, message: str, remedy: str = "") -> None:
        """Report a problem at a node."""
        self.problems.append(Problem(*place_of(node), message, remedy))


def place_of(node: yaml.Node) -> tuple[int, int]:
    """Line and column of a node, from 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


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
        value = self.scalar(node.value, plain=node.style is None)
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
        value = int(found[3]) if found[3] else int(float(found[1]) * _UNITS[found[2]])
        return value if 0 < value < 1 << 60 else INVALID

    def schema(self) -> dict[str, Any]:
        pattern = r"^([0-9]+B?|[0-9]+(\.[0-9]+)?\s*[KMGT](i?B)?)$"
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
        return {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*[smhd]$"}


class Rate(Kind):
    """Requests per second; units /s, /m, /h."""

    words = "a rate such as 5/s or 100/m"

    def scalar(self, text: str, *, plain: bool) -> Any:
        found = _RATE.fullmatch(text)
        if not found or len(text) > 24 or float(found[1]) <= 0:
            return INVALID
        return float(found[1]) / _SECONDS[found[2]]

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*/\s*[smh]$"}


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number in a range."""

    least: int = 1
    most: int = 10**9

    @property
    def words(self) -> str:  # type: ignore[override]
        return f"a whole number from {self.least} to {self.most}"

    def scalar(self, text: str, *, plain: bool) -> Any:
        if not plain or not re.fullmatch(r"0|[1-9]\d{0,9}", text, re.ASCII):
            return INVALID
        if not self.least <= int(text) <= self.most:
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
        if not plain or not re.fullmatch(r"(0|[1-9]\d{0,5})(\.\d{1,6})?|\.\d{1,6}", text, re.ASCII):
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
    """Text without control characters; with `pattern`, matching it whole.

    `loose` also takes the empty text in quotes, and numbers and truth values, as they are written.
    """

    words: str = "text"
    pattern: str = ""
    loose: bool = False

    def scalar(self, text: str, *, plain: bool) -> Any:
        if len(text) > _LONGEST_TEXT or (plain and text in _NULLS):
            return INVALID
        if not text and not self.loose:
            return INVALID
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in text):
            return INVALID
        return text if not self.pattern or re.fullmatch(self.pattern, text, re.ASCII) else INVALID

    def schema(self) -> dict[str, Any]:
        if self.loose:
            return {"type": ["string", "number", "boolean"], "maxLength": _LONGEST_TEXT}
        schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": _LONGEST_TEXT}
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
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS:
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
        values: list[Any] = []
        for number, item in enumerate(node.value):
            value = self.inner.read(item, reader, f"{name}[{number}]")
            if value is INVALID:
                continue
            if self.unique and value in values:
                reader.bad(item, f"`{name}` names the same thing twice.", "Remove one.")
            reader.places[f"{name}[{len(values)}]"] = place_of(item)
            values.append(value)
        return values

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.inner.schema(), "maxItems": self.most}
        return {**schema, "uniqueItems": True} if self.unique else schema


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
                shown = key if len(key) <= 60 else key[:60] + "…"
                reader.bad(
                    key_node, f"{shown!r} cannot be a name in `{name}`.", f"It must be {self.key.words}."
                )
                continue
            reader.places[f"{name}.{key}"] = place_of(key_node)
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


@dataclass(frozen=True)
class Key:
    """One key of a section: its kind, its words for the reference, whether it must be there."""

    kind: Kind
    words: str
    example: str = ""
    required: bool = False


@dataclass(frozen=True)
class Section(Kind):
    """A mapping with known keys. `short` reads a bare scalar as the key of that name.

    `later` names keys that are known but that nothing can honour yet: an error of their own, never ignored.
    `least` is the number of keys there must be.
    """

    keys: Mapping[str, Key]
    short: str = ""
    later: tuple[str, ...] = ()
    least: int = 0

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
            if known is None and key in self.later:
                reader.bad(key_node, f"`{prefix}{key}` is not available in this version.", "Remove it.")
                continue
            if known is None:
                allowed = ", ".join(self.keys)
                where = f" in `{name}`" if name else ""
                hint = _nearest(key, self.keys)
                reader.bad(
                    key_node, f"Unknown key `{key[:60]}`{where}.", f"{hint} Allowed keys: {allowed}.".strip()
                )
                continue
            reader.places[f"{prefix}{key}"] = place_of(key_node)
            value = known.kind.read(value_node, reader, f"{prefix}{key}")
            if value is not INVALID:
                values[key] = value
        for key, known in self.keys.items():
            if known.required and key not in pairs:
                reader.bad(node, f"The key `{prefix}{key}` is missing.", f"Add `{key}: {known.example}`.")
        if len(pairs) < self.least:
            reader.bad(node, f"`{name}` names nothing.", f"Write one of: {', '.join(self.keys)}.")
        return values

    def schema(self) -> dict[str, Any]:
        properties = {
            name: {**key.kind.schema(), "description": key.words} for name, key in self.keys.items()
        }
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required := [name for name, key in self.keys.items() if key.required]:
            schema["required"] = required
        if self.least:
            schema["minProperties"] = self.least
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

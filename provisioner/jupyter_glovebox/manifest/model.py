"""Manifest and policy, version 1: their keys, defaults, and the structures they are read into.

The tables `MANIFEST` and `POLICY` are the one definition: loader, JSON Schema and reference come from them.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from .fields import (
    Choice,
    Duration,
    Key,
    ListOf,
    MapOf,
    Number,
    Optional,
    Rate,
    Section,
    Size,
    Text,
    Truth,
    Whole,
)
from .names import AbsolutePath, InputPath, OutputPath, VariableName
from .plan import (
    CONTROLS,
    TYPES,
    Budgets,
    Credential,
    Display,
    Isolation,
    NetworkRule,
    Outputs,
    Scratch,
    Workload,
)

DEFAULT_TYPES = (
    "csv", "tsv", "xlsx", "ods", "parquet", "arrow", "json", "jsonl", "txt", "md", "png", "jpeg", "gif", "pdf",
)  # fmt: skip
WORKLOADS: tuple[Workload, ...] = ("trusted-adapter", "generated-code", "third-party-binary")
"""From the most to the least trusted; a manifest may only move to the right."""

_M, _G = 1 << 20, 1 << 30
DEFAULT_BUDGETS = Budgets(
    memory=2 * _G,
    cpus=1.5,
    cpu_time=1800.0,
    wall_time=43200.0,
    processes=256,
    open_files=4096,
    display=50 * _M,
)
CEILINGS = Budgets(
    memory=16 * _G, cpus=16.0, cpu_time=86400.0, wall_time=7 * 86400.0, processes=4096, open_files=65536,
    display=500 * _M,
)  # fmt: skip
DEFAULT_SCRATCH = Scratch(size=512 * _M)
SCRATCH_CEILING = 8 * _G
DEFAULT_OUTPUTS = Outputs(max_files=20, max_file_size=50 * _M, max_total_size=200 * _M, types=DEFAULT_TYPES)
OUTPUTS_CEILING = Outputs(
    max_files=500, max_file_size=_G, max_total_size=4 * _G, types=TYPES,
    formulas="allow", secrets="allow", inputs_copied="allow",
)  # fmt: skip
STRICTNESS = {
    "formulas": ("allow", "neutralise", "reject"),
    "secrets": ("allow", "review", "reject"),
    "inputs_copied": ("allow", "review", "reject"),
}
"""What the verifier does about a finding, from the most to the least permissive."""

_NAME = Text("a name of letters, digits, dot, dash or underscore", r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PERSON = Text("the name of a user or group", r"[^\s:/,]{1,100}")
_URL_PATH = Text("a path that begins with `/`", r"/.*")
_HOST = Text("a host name or address", r"[A-Za-z0-9.\-:\[\]*_]{1,253}")
_METHOD = Choice(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_ISOLATION = Choice(("bubblewrap", "gvisor"))
_CONTROL = Choice(CONTROLS)

BUDGETS = Section(
    {
        "memory": Key(Size(), "memory of all processes together; the kernel ends when it is reached", "2G"),
        "cpus": Key(Number(0.1, 1024), "processor cores, also fractions", "1.5"),
        "cpu_time": Key(Duration(), "processor time of the kernel's whole life", "30m"),
        "wall_time": Key(Duration(), "longest life of the kernel", "2h"),
        "processes": Key(Whole(8, 100_000), "processes and threads at one time", "128"),
        "open_files": Key(Whole(64, 1_000_000), "open files of one process", "1024"),
        "display": Key(Size(), "bytes of output that reach the client", "50M"),
    }
)
SCRATCH = Section(
    {
        "size": Key(Size(), "size of the working folder", "512M"),
        "on": Key(Choice(("memory", "disk")), "memory (a hard limit) or disk (watched)", "memory"),
    }
)
_OUTPUT_KEYS = {
    "max_files": Key(Whole(1, 100_000), "how many files may leave", "20"),
    "max_file_size": Key(Size(), "size of one file", "50M"),
    "max_total_size": Key(Size(), "size of all files together", "200M"),
    "types": Key(
        ListOf(Choice(TYPES)), "content types that may leave, by content and not by name", "[csv, png]"
    ),
    "formulas": Key(Choice(STRICTNESS["formulas"]), "cells that a spreadsheet would run", "neutralise"),
    "secrets": Key(Choice(STRICTNESS["secrets"]), "text that looks like a credential", "reject"),
    "inputs_copied": Key(Choice(STRICTNESS["inputs_copied"]), "rows copied from an input", "review"),
}
EXPECTED = Section(
    {
        "columns": Key(
            MapOf(Choice(("string", "number", "integer"))),
            "the columns of a table in their order, and what they hold",
            "{client_id: string, total: number}",
        ),
        "min_rows": Key(Whole(0), "how many rows there must be", "1"),
    }
)
OUTPUTS_POLICY = tuple(_OUTPUT_KEYS)
"""The keys of `outputs` that a policy has."""
OUTPUTS = Section(
    {
        "path": Key(
            OutputPath(),
            "folder for results; `.` makes every new file in the working folder a result",
            "outputs",
        ),
        **_OUTPUT_KEYS,
        "expect": Key(MapOf(EXPECTED), "what a file must hold, by file name", "{clean.csv: {min_rows: 1}}"),
    }
)
NETWORK = Section(
    {
        "host": Key(_HOST, "host name", "api.rates.example", required=True),
        "port": Key(Whole(1, 65535), "port", "443"),
        "protocol": Key(Choice(("https", "http", "tcp")), "protocol", "https"),
        "methods": Key(ListOf(_METHOD), "HTTP methods", "[GET]"),
        "paths": Key(ListOf(_URL_PATH), "URL paths, `**` for any rest", "[/v1/rates/**]"),
        "headers": Key(MapOf(Text()), "headers a request must have"),
        "query": Key(MapOf(Text()), "query parameters a request must have"),
        "websocket": Key(Truth(), "whether a connection may become a WebSocket"),
        "http2": Key(Truth(), "whether HTTP/2 may be used"),
        "max_requests": Key(Whole(), "requests of the kernel's whole life"),
        "max_concurrent": Key(Whole(), "requests at one time"),
        "rate": Key(Rate(), "requests per time", "5/s"),
        "max_bytes_out": Key(Size(), "bytes sent"),
        "max_bytes_in": Key(Size(), "bytes received"),
    }
)
CREDENTIAL = Section(
    {
        "name": Key(_NAME, "name of a credential in the policy", "RATES_TOKEN", required=True),
        "use": Key(_HOST, "the only host it is used for", "api.rates.example", required=True),
        "methods": Key(ListOf(_METHOD), "HTTP methods", "[GET]"),
        "paths": Key(ListOf(_URL_PATH), "URL paths"),
        "ttl": Key(Duration(), "how long it is lent", "15m"),
    }
)
MANIFEST = Section(
    {
        "version": Key(Choice(("1",)), "version of this format", "1", required=True),
        "name": Key(_NAME, "a name for reports", "spreadsheet-cleaning", required=True),
        "isolation": Key(_ISOLATION, "the weakest isolation that is accepted", "bubblewrap"),
        "workload": Key(
            Choice(WORKLOADS), "what kind of code this is; may only be less trusted than policy says"
        ),
        "require": Key(
            ListOf(_CONTROL), "controls that must be enforced, else no start", "[memory, network]"
        ),
        "inputs": Key(
            ListOf(
                Section(
                    {
                        "path": Key(
                            InputPath(), "file, folder or pattern", "data/clients.xlsx", required=True
                        ),
                        "sha256": Key(
                            Optional(Text("64 hexadecimal digits", r"[0-9a-fA-F]{64}")),
                            "digest the file must have",
                        ),
                    },
                    short="path",
                ),
                most=200,
            ),
            "files and folders to read, relative to the notebook's folder; `.` is the whole folder",
            "[data/clients.xlsx]",
        ),
        "scratch": Key(SCRATCH, "the working folder: writable, and gone at the end", "{size: 512M}"),
        "outputs": Key(OUTPUTS, "where results are written, and what may leave", "{path: outputs}"),
        "network": Key(ListOf(NETWORK, most=100), "endpoints; absent or [] means none", "[]"),
        "operations": Key(ListOf(_NAME), "named operations from policy", "[]"),
        "credentials": Key(ListOf(CREDENTIAL, most=50), "credentials used on the notebook's behalf", "[]"),
        "environment": Key(
            MapOf(Text("text", loose=True), key=VariableName()),
            "environment variables for the kernel",
            "{TZ: Europe/Zurich}",
        ),
        "devices": Key(ListOf(Choice(("gpu",))), "devices, where policy allows", "[]"),
        "budgets": Key(BUDGETS, "limits; each that ends a kernel is named", "{memory: 2G}"),
        "display": Key(
            Section(
                {
                    "html": Key(Choice(("isolated", "sanitized", "allow", "deny")), "HTML in outputs"),
                    "javascript": Key(Choice(("isolated", "allow", "deny")), "scripts in outputs"),
                    "widgets": Key(Choice(("allow", "deny")), "interactive widgets"),
                }
            ),
            "what outputs may do in the browser",
        ),
        "observation": Key(Choice(("standard", "strict")), "strict also sees stat, access and readlink"),
    }
)
_POLICY_KEYS = {
    "baseline": Key(
        Choice(("allow", "refuse")), "notebooks without an approved manifest: baseline, or no start"
    ),
    "workload": Key(Choice(WORKLOADS), "how code is regarded unless a manifest trusts it less"),
    "isolation": Key(
        Section({name: Key(_ISOLATION, f"isolation for {name}") for name in WORKLOADS}),
        "isolation per workload",
    ),
    "require": Key(ListOf(_CONTROL), "controls that must be enforced for every kernel"),
    "denials": Key(
        Choice(("explicit", "uniform")),
        "explicit: a hidden path that exists says Permission denied; uniform: no difference to one that does not "
        "(holds in a managed policy that has no such key)",
    ),
    "approval": Key(Choice(("click", "code")), "how a person approves in the browser"),
    "forbidden_mounts": Key(ListOf(AbsolutePath()), "paths that are never mounted, with all below them"),
    "forbidden_inputs_outside": Key(Truth(), "refuse inputs outside the notebook's own folder"),
    "scratch": Key(Size(), "largest scratch"),
    "outputs": Key(
        Section(_OUTPUT_KEYS),
        "most that may leave; formulas, secrets and inputs_copied: the most permissive choice",
    ),
    "budgets": Key(BUDGETS, "largest budgets"),
}
# What only widens what a gateway, a broker and a download gate, which are not there yet, would allow.
_POLICY_LATER = ("network", "credentials", "operations", "devices", "download", "display")
POLICY = Section(
    {
        "version": Key(Choice(("1",)), "version of this format", "1", required=True),
        "enforce": Key(Truth(), "whether every kernelspec is sandboxed by the Jupyter server"),
        **_POLICY_KEYS,
        "rules": Key(
            ListOf(
                Section(
                    {
                        "match": Key(
                            Section(
                                {
                                    "path": Key(AbsolutePath(), "pattern of the notebook's real path"),
                                    "user": Key(ListOf(_PERSON), "user names"),
                                    "group": Key(ListOf(_PERSON), "group names"),
                                },
                                least=1,
                            ),
                            "every given selector must match",
                            "{path: /srv/class/**}",
                            required=True,
                        ),
                        **_POLICY_KEYS,
                    },
                    later=_POLICY_LATER,
                ),
                most=100,
                unique=False,
            ),
            "other values for some notebooks or people; later rules win",
        ),
    },
    later=_POLICY_LATER,
)


class ManifestInput(msgspec.Struct, frozen=True):
    """One entry of `inputs`, as written."""

    path: str
    sha256: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest as read. `places` maps the dotted name of each written key to its line and column."""

    name: str
    isolation: Isolation | None = None
    workload: Workload | None = None
    require: tuple[str, ...] = ()
    inputs: tuple[ManifestInput, ...] = ()
    scratch: Scratch = DEFAULT_SCRATCH
    outputs: Outputs | None = None
    network: tuple[NetworkRule, ...] = ()
    operations: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()
    environment: dict[str, str] = {}
    devices: tuple[str, ...] = ()
    budgets: Budgets = DEFAULT_BUDGETS
    display: Display = Display()
    observation: Literal["standard", "strict"] = "standard"
    places: dict[str, tuple[int, int]] = {}
    file: str = ""

    @property
    def digest(self) -> str:
        """`sha256:` and 64 hex digits over the values; comments and the order of keys do not count."""
        bare = msgspec.structs.replace(self, places={}, file="")
        return "sha256:" + hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The admin's ceilings, after rules have been applied. `file` is empty for the built-in defaults."""

    enforce: bool = True
    baseline: Literal["allow", "refuse"] = "allow"
    workload: Workload = "generated-code"
    isolation: dict[str, Isolation] = msgspec.field(
        default_factory=lambda: dict.fromkeys(WORKLOADS, "bubblewrap")
    )
    require: tuple[str, ...] = ()
    denials: Literal["explicit", "uniform"] = "explicit"
    approval: Literal["click", "code"] = "click"
    forbidden_mounts: tuple[str, ...] = ()
    forbidden_inputs_outside: bool = False
    scratch: int = SCRATCH_CEILING
    outputs: Outputs = OUTPUTS_CEILING
    budgets: Budgets = CEILINGS
    rules: tuple[dict[str, Any], ...] = ()
    file: str = ""

    @property
    def digest(self) -> str:
        """As `Manifest.digest`."""
        bare = msgspec.structs.replace(self, file="")
        return "sha256:" + hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


def manifest_from(values: dict[str, Any], places: dict[str, tuple[int, int]], file: str) -> Manifest:
    """Build a manifest from checked values; what is not written gets the default."""
    known = dict(values)
    known.pop("version", None)
    if "scratch" in known:
        known["scratch"] = msgspec.structs.replace(DEFAULT_SCRATCH, **known["scratch"])
    if "outputs" in known:
        given = dict(known["outputs"])
        given["types"] = tuple(given.get("types", DEFAULT_TYPES))
        known["outputs"] = msgspec.structs.replace(DEFAULT_OUTPUTS, **given)
    if "budgets" in known:
        known["budgets"] = msgspec.structs.replace(DEFAULT_BUDGETS, **known["budgets"])
    if "display" in known:
        known["display"] = Display(**known["display"])
    known["inputs"] = tuple(ManifestInput(**{**i, "sha256": (i.get("sha256") or "").lower() or None})
                            for i in known.get("inputs", ()))  # fmt: skip
    known["network"] = tuple(NetworkRule(**_tuples(rule)) for rule in known.get("network", ()))
    known["credentials"] = tuple(
        Credential(**_tuples({"ttl": 900.0, **c})) for c in known.get("credentials", ())
    )
    for name in ("require", "operations", "devices"):
        known[name] = tuple(known.get(name, ()))
    return Manifest(**known, places=places, file=file)


def policy_from(values: dict[str, Any], file: str, *, managed: bool = False) -> Policy:
    """Build a policy from checked values; a managed one does not tell tenants what exists on the host."""
    known = {"denials": "uniform", **values} if managed else dict(values)
    known.pop("version", None)
    rules = tuple(known.pop("rules", ()))
    return with_section(Policy(rules=rules, file=file), known)


def with_section(policy: Policy, values: dict[str, Any]) -> Policy:
    """The policy with the given values in place of its own."""
    known: dict[str, Any] = {k: v for k, v in values.items() if k != "match"}
    if "isolation" in known:
        known["isolation"] = {**policy.isolation, **known["isolation"]}
    if "outputs" in known:
        given = dict(known["outputs"])
        if "types" in given:
            given["types"] = tuple(given["types"])
        known["outputs"] = msgspec.structs.replace(policy.outputs, **given)
    if "budgets" in known:
        known["budgets"] = msgspec.structs.replace(policy.budgets, **known["budgets"])
    for name in ("require", "forbidden_mounts"):
        if name in known:
            known[name] = tuple(known[name])
    return msgspec.structs.replace(policy, **known)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

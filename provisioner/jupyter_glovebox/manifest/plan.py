"""The plan: the compiled, immutable result of manifest and policy. Everything below enforces a plan.

A plan crosses process borders as JSON (`Plan.to_json`, `Plan.from_json`). Its digest names what it
allows; the identities of input files at the moment of compilation (`InputGrant.identity`) are facts
about the host, not rights, so they do not enter the digest.

Units: sizes in bytes, times in seconds.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Isolation = Literal["bubblewrap", "gvisor"]
Workload = Literal["trusted-adapter", "generated-code", "third-party-binary"]

CONTROLS = (
    "user", "uid", "capabilities", "pid", "mount", "network", "ipc", "uts", "cgroup_namespace",
    "seccomp", "landlock", "no_new_privileges", "environment", "descriptors", "memory", "cpus",
    "cpu_time", "processes", "wall_time", "storage", "open_files", "observation", "relay", "gateway",
    "approval",
)  # fmt: skip
"""Every control by its name in posture, in the order in which it is shown."""


TYPES = (
    "csv", "tsv", "xlsx", "ods", "parquet", "arrow", "json", "jsonl", "txt", "md", "html", "svg", "png",
    "jpeg", "gif", "webp", "pdf", "ipynb", "zip", "tar", "gz", "npy", "npz", "sqlite", "hdf5", "safetensors",
    "yaml",
)  # fmt: skip
"""Content types that a manifest can let leave, by name."""


class _Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class SourceIdentity(_Frozen, frozen=True, kw_only=True):
    """What a path pointed to when the plan was compiled (stat(2))."""

    device: int
    inode: int
    mtime_ns: int
    size: int


class InputGrant(_Frozen, frozen=True, kw_only=True):
    """One file or folder, read-only inside.

    Attributes:
        path: absolute name inside, as the notebook uses it.
        source: the real path on the host, free of links. It is a name inside as well.
        kind: what the source is.
        sha256: lower-case hex digest the file must have at start, if the manifest pins one.
        identity: the source at compile time; None in a plan that was not resolved against a host.
    """

    path: str
    source: str
    kind: Literal["file", "directory"]
    sha256: str | None = None
    identity: SourceIdentity | None = None


class Scratch(_Frozen, frozen=True, kw_only=True):
    """The disposable working folder. `memory` is a sized tmpfs, `disk` a watched host folder."""

    size: int
    on: Literal["memory", "disk"] = "memory"


class Outputs(_Frozen, frozen=True, kw_only=True):
    """Where results may be written, and what may leave.

    Attributes:
        path: folder name relative to the working folder; "." makes every new file there a candidate.
        types: allowed content types by name (`csv`, `xlsx`, `png`, …); empty means no type may leave.
        expect: content expectations per file name, as in the manifest.
        formulas, secrets, inputs_copied: what the verifier does about each finding.
    """

    path: str = "outputs"
    max_files: int
    max_file_size: int
    max_total_size: int
    types: tuple[str, ...]
    expect: dict[str, Any] = {}
    formulas: Literal["neutralise", "allow", "reject"] = "neutralise"
    secrets: Literal["reject", "review", "allow"] = "reject"
    inputs_copied: Literal["review", "reject", "allow"] = "review"


class NetworkRule(_Frozen, frozen=True, kw_only=True):
    """One endpoint the gateway may reach. Rates in requests per second."""

    host: str
    port: int = 443
    protocol: Literal["https", "http", "tcp"] = "https"
    methods: tuple[str, ...] = ("GET",)
    paths: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    query: dict[str, str] = {}
    websocket: bool = False
    http2: bool = False
    max_requests: int | None = None
    max_concurrent: int | None = None
    rate: float | None = None
    max_bytes_out: int | None = None
    max_bytes_in: int | None = None


class Credential(_Frozen, frozen=True, kw_only=True):
    """A credential the broker may use for the sandbox; the secret itself never enters. `ttl` in seconds."""

    name: str
    use: str
    methods: tuple[str, ...] = ("GET",)
    paths: tuple[str, ...] = ()
    ttl: float


class Budgets(_Frozen, frozen=True, kw_only=True):
    """Limits whose end is always named. Bytes, cores, seconds, counts."""

    memory: int
    cpus: float
    cpu_time: float
    wall_time: float
    processes: int
    open_files: int
    display: int


class Display(_Frozen, frozen=True, kw_only=True):
    """What outputs may do in the client."""

    html: Literal["isolated", "sanitized", "allow", "deny"] = "isolated"
    javascript: Literal["isolated", "allow", "deny"] = "isolated"
    widgets: Literal["allow", "deny"] = "deny"


class Plan(_Frozen, frozen=True, kw_only=True):
    """What one kernel may do. Everything not named here is denied.

    Attributes:
        name: the manifest's name, or "baseline".
        baseline: True when no approved manifest stands behind the plan.
        notebook: real path of the notebook, or None (`exec`, other clients).
        workdir: the working folder's absolute path, the same inside and on the host.
        require: controls that must be `enforced`, else no start.
        isolation: the isolation to use (policy has already decided).
        devices: device grants by name.
        environment: variables for the kernel, beside those the environment discovery sets.
        denials: `explicit` (EACCES for hidden names that exist) or `uniform` (by prefix).
        manifest, policy: digests of the texts the plan came from; manifest None for the baseline.
        approval: how the manifest was approved: `none`, `caller` (`run --manifest`), `click`, `code`.
        forbidden_mounts: policy's extra real paths that must never be mounted.
    """

    version: Literal[1] = 1
    name: str
    baseline: bool
    notebook: str | None
    workdir: str
    isolation: Isolation
    workload: Workload
    require: tuple[str, ...] = ()
    inputs: tuple[InputGrant, ...] = ()
    scratch: Scratch
    outputs: Outputs | None
    network: tuple[NetworkRule, ...] = ()
    operations: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()
    environment: dict[str, str] = {}
    devices: tuple[str, ...] = ()
    budgets: Budgets
    display: Display = Display()
    observation: Literal["standard", "strict"] = "standard"
    denials: Literal["explicit", "uniform"] = "explicit"
    manifest: str | None = None
    policy: str
    approval: Literal["none", "caller", "click", "code"] = "none"
    forbidden_mounts: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """`sha256:` and 64 hex digits over the canonical JSON of the plan without input identities."""
        bare = msgspec.structs.replace(
            self, inputs=tuple(msgspec.structs.replace(i, identity=None) for i in self.inputs)
        )
        text = msgspec.json.encode(bare, order="deterministic")
        return "sha256:" + hashlib.sha256(text).hexdigest()

    def to_json(self) -> bytes:
        """Canonical JSON: the same plan always gives the same bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, text: bytes | str) -> Plan:
        """Decode and check.

        Raises:
            msgspec.ValidationError: a field is missing, unknown or of a wrong type.
            msgspec.DecodeError: not JSON.
        """
        return msgspec.json.decode(text, type=cls)

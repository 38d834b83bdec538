"""From manifest and policy to a plan.

A manifest that asks for more than policy allows is an error that names both; nothing is lowered in
silence. Only defaults, which nobody wrote, follow the ceiling down.
"""

from __future__ import annotations

import glob
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from ..errors import RefusedError, UsageError
from ..ledger.events import escape
from . import approvals
from .fields import Problem
from .loading import ManifestError, load_manifest
from .model import DEFAULT_OUTPUTS, WORKLOADS, Manifest, ManifestInput, Policy
from .plan import Budgets, InputGrant, Outputs, Plan, Scratch, SourceIdentity, Workload
from .policy import current_policy, policy_for

ApprovalKind = Literal["none", "caller", "click", "code"]
_MOST_INPUTS = 1000
_OWN_VARIABLES = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "TMPDIR", "IFS", "ENV", "BASH_ENV", "PYTHONPATH",
                  "PYTHONHOME", "PYTHONSTARTUP", "GLIBC_TUNABLES")  # fmt: skip
_OWN_PREFIXES = ("LD_", "JPY_", "JUPYTER_", "GIT_CONFIG")


@dataclass(frozen=True)
class Resolution:
    """A plan and where it came from. `notice` says why it is not more, in one or two sentences."""

    plan: Plan
    manifest_file: Path | None = None
    notice: str = ""


def find_manifest(notebook: Path) -> Path | None:
    """`NAME.glovebox.yaml` beside `NAME.ipynb`, else `glovebox.yaml` in its folder."""
    for candidate in (notebook.with_suffix(".glovebox.yaml"), notebook.parent / "glovebox.yaml"):
        if os.path.lexists(candidate):
            return candidate
    return None


def outputs_of(manifest: Manifest | None) -> Outputs | None:
    """The outputs a manifest names; the defaults for None."""
    return DEFAULT_OUTPUTS if manifest is None else manifest.outputs


def resolve(
    notebook: Path | None,
    *,
    manifest_file: Path | None = None,
    workdir: Path | None = None,
    caller_approves: bool = False,
    baseline: bool = False,
) -> Resolution:
    """What a notebook (or a command in `workdir`) may do now.

    With `manifest_file` and `caller_approves` that manifest counts. Otherwise the manifest beside the
    notebook counts if it is approved as it stands; else the baseline, with a notice.

    Raises:
        UsageError: the notebook is missing or is none.
        ManifestError: the manifest or the policy is not valid, or asks for more than policy allows.
        RefusedError: policy or a change since the approval refuses the start.
    """
    if notebook is not None:
        notebook = _real_notebook(notebook)
        workdir = workdir or notebook.parent
    folder = Path(os.path.realpath(workdir or Path.cwd()))
    policy = policy_for(current_policy(), str(notebook or folder))
    if manifest_file is not None and caller_approves:
        plan = compile_plan(
            load_manifest(manifest_file), policy, notebook=notebook, workdir=folder, approval="caller"
        )
        return Resolution(plan, manifest_file)
    beside = find_manifest(notebook) if notebook is not None and not baseline else None
    approval = approvals.find(notebook) if beside is not None and notebook is not None else None
    if beside is not None and approval is not None:
        manifest = load_manifest(beside)
        if manifest.digest == approval.manifest:
            plan = compile_plan(
                manifest,
                policy,
                notebook=notebook,
                workdir=folder,
                approval=approval.method,
                approved=approval.sources,
            )
            return Resolution(plan, beside)
    notice = "" if baseline or notebook is None else _why_baseline(notebook, beside, approval is not None)
    if policy.baseline == "refuse":
        raise RefusedError(
            f"The policy {policy.file} starts no notebook without an approved manifest. {notice}".strip(),
            "Write a manifest (jupyter glovebox init NOTEBOOK) and approve it (jupyter glovebox approve NOTEBOOK).",
        )
    return Resolution(
        compile_plan(None, policy, notebook=notebook, workdir=folder, approval="none"), beside, notice
    )


def _why_baseline(notebook: Path, beside: Path | None, approved_before: bool) -> str:
    name = escape(str(notebook))
    if beside is None:
        return (
            f"No manifest for {name}: it runs on the baseline (no inputs, no outputs, no network). "
            f"Draft one with: jupyter glovebox init {name}"
        )
    why = "has changed since it was approved" if approved_before else "is not approved"
    return (
        f"The manifest {escape(beside.name)} {why}: {name} runs on the baseline (no inputs, no outputs, no "
        f"network). Look at it and approve it with: jupyter glovebox approve {name}"
    )


def _real_notebook(notebook: Path) -> Path:
    real = Path(os.path.realpath(notebook))
    if not real.is_file():
        raise UsageError(f"There is no notebook at {escape(str(notebook))}.", "Name an existing .ipynb file.")
    if real.suffix != ".ipynb":
        raise UsageError(f"{escape(str(notebook))} is not a notebook.", "Name a file that ends in .ipynb.")
    return real


# -- compiling ----------------------------------------------------------------------------------


def compile_plan(
    manifest: Manifest | None,
    policy: Policy,
    *,
    notebook: Path | None,
    workdir: Path,
    approval: ApprovalKind,
    approved: dict[str, str] | None = None,
) -> Plan:
    """Intersect a manifest (None: the baseline) with a policy.

    Args:
        notebook, workdir: real paths.
        approval: how the manifest was approved.
        approved: where each input led when it was approved, to be compared.

    Raises:
        ManifestError: the manifest asks for more than policy or this version allows.
        RefusedError: an input leads elsewhere than when it was approved.
    """
    asked = manifest or Manifest(name="baseline")
    limits = _Limits(asked, policy)
    workload = limits.workload()
    outputs = limits.outputs(str(workdir))
    inputs = _Inputs(asked, workdir, outputs, policy, approved).grants() if asked.inputs else ()
    limits.not_built()
    limits.environment()
    limits.finish()
    return Plan(
        name=asked.name,
        baseline=manifest is None,
        notebook=None if notebook is None else str(notebook),
        workdir=str(workdir),
        require=tuple(sorted({*asked.require, *policy.require})),
        isolation=policy.isolation[workload],
        workload=workload,
        inputs=inputs,
        scratch=limits.scratch(),
        outputs=outputs,
        environment=dict(sorted(asked.environment.items())),
        budgets=limits.budgets(),
        display=asked.display,
        observation=asked.observation,
        denials=policy.denials,
        manifest=None if manifest is None else manifest.digest,
        policy=policy.digest,
        approval=approval,
        forbidden_mounts=policy.forbidden_mounts,
    )


class _Limits:
    """Compares what is asked with the ceilings; problems carry the line of the key."""

    def __init__(self, manifest: Manifest, policy: Policy) -> None:
        self._manifest = manifest
        self._policy = policy
        self._where = f"the policy {policy.file}" if policy.file else "the built-in policy"
        self._problems: list[Problem] = []
        self._budgets = self._each("budgets", manifest.budgets, policy.budgets)
        self._scratch = self._one("scratch.size", manifest.scratch.size, policy.scratch)

    def _bad(self, key: str, message: str, remedy: str) -> None:
        line = self._manifest.places.get(key) or self._manifest.places.get(key.partition(".")[0], 1)
        self._problems.append(Problem(line, 1, message, remedy))

    def _one(self, key: str, asked: Any, ceiling: Any) -> Any:
        if asked <= ceiling:
            return asked
        if key in self._manifest.places:
            self._bad(
                key,
                f"`{key}` asks for {_plain(key, asked)}; {self._where} allows {_plain(key, ceiling)}.",
                f"Lower it to {_plain(key, ceiling)}.",
            )
        return ceiling

    def _each(self, section: str, asked: Any, ceilings: Any) -> dict[str, Any]:
        return {
            name: self._one(f"{section}.{name}", getattr(asked, name), getattr(ceilings, name))
            for name in Budgets.__struct_fields__
        }

    def budgets(self) -> Budgets:
        return Budgets(**self._budgets)

    def scratch(self) -> Scratch:
        return msgspec.structs.replace(self._manifest.scratch, size=self._scratch)

    def workload(self) -> Workload:
        """The less trusted of what policy and manifest say."""
        asked = self._manifest.workload
        if asked is not None and WORKLOADS.index(asked) < WORKLOADS.index(self._policy.workload):
            self._bad(
                "workload",
                f"`workload: {asked}` trusts the code more than {self._where} does ({self._policy.workload}).",
                "Remove the key.",
            )
        chosen = max(asked or WORKLOADS[0], self._policy.workload, key=WORKLOADS.index)
        isolation = self._policy.isolation[chosen]
        for key, name in (("isolation", self._manifest.isolation), ("workload", isolation)):
            if name == "gvisor":
                self._bad(key, "The isolation `gvisor` is not available in this version.", "Use bubblewrap.")
        return chosen

    def outputs(self, workdir: str) -> Outputs | None:
        asked, most = self._manifest.outputs, self._policy.outputs
        if asked is None:
            return None
        path = os.path.normpath(asked.path)
        if path.startswith(("/", "..")) or "\0" in path or path.split("/")[0] == "..":
            self._bad(
                "outputs.path", "`outputs.path` leaves the notebook's folder.", "Name a folder below it."
            )
            path = "outputs"
        elif path != "." and any(part.startswith(".") for part in path.split("/")):
            # Files that are put into .git, .ipython and the like are run by other programs.
            self._bad("outputs.path", "No name in `outputs.path` may begin with a dot.", "Use `outputs`.")
        elif os.path.realpath(os.path.join(workdir, path)) != os.path.normpath(os.path.join(workdir, path)):
            self._bad(
                "outputs.path",
                f"`{escape(path)}` in the notebook's folder is a link, or lies behind one: results would go elsewhere.",
                "Remove the link, or choose another outputs.path.",
            )
        if path.count("/") > 5:
            self._bad("outputs.path", "`outputs.path` is nested too deeply.", "Use at most 6 levels.")
        values = {
            name: self._one(f"outputs.{name}", getattr(asked, name), getattr(most, name))
            for name in ("max_files", "max_file_size", "max_total_size")
        }
        types = tuple(t for t in asked.types if t in most.types)
        if "outputs.types" in self._manifest.places and (
            more := [t for t in asked.types if t not in most.types]
        ):
            self._bad("outputs.types", f"{self._where} does not let {', '.join(more)} leave.", "Remove it.")
        return msgspec.structs.replace(asked, path=path, types=types, **values)

    def not_built(self) -> None:
        for key in ("network", "operations", "credentials", "devices"):
            if getattr(self._manifest, key):
                self._bad(
                    key,
                    f"`{key}` is not available in this version: nothing can enforce it yet.",
                    f"Remove `{key}`.",
                )
        if self._manifest.observation == "strict":
            self._bad(
                "observation", "`observation: strict` is not available in this version.", "Use standard."
            )

    def environment(self) -> None:
        for name in self._manifest.environment:
            if name in _OWN_VARIABLES or name.startswith(_OWN_PREFIXES):
                self._bad(
                    f"environment.{name}"
                    if f"environment.{name}" in self._manifest.places
                    else "environment",
                    f"The variable {name} cannot be set by a manifest: the sandbox sets it, or it loads code.",
                    "Remove it.",
                )

    def finish(self) -> None:
        if self._problems:
            raise ManifestError(self._manifest.file or "manifest", self._problems)


def _plain(key: str, value: Any) -> str:
    name = key.rpartition(".")[2]
    if name in ("memory", "display", "size") or name.endswith("_size"):
        return f"{value / (1 << 20):g}M"
    return f"{value:g}s" if name in ("cpu_time", "wall_time") else f"{value:g}"


class _Inputs:
    """Resolves what `inputs` names: once, to real paths, with the identity of each."""

    def __init__(
        self,
        manifest: Manifest,
        workdir: Path,
        outputs: Outputs | None,
        policy: Policy,
        approved: dict[str, str] | None,
    ) -> None:
        self._manifest = manifest
        self._workdir = str(workdir)
        self._outputs = None if outputs is None or outputs.path == "." else f"{workdir}/{outputs.path}"
        self._policy = policy
        self._approved = approved
        self._found: dict[str, InputGrant] = {}

    def grants(self) -> tuple[InputGrant, ...]:
        """Every input, sorted by its name inside."""
        for number, entry in enumerate(self._manifest.inputs):
            for path in self._names(entry, number):
                self._add(path, entry, number)
        return tuple(self._found[path] for path in sorted(self._found))

    def _fail(self, number: int, message: str, remedy: str = "") -> NoReturn:
        line = self._manifest.places.get(f"inputs[{number}].path") or self._manifest.places.get("inputs", 1)
        raise ManifestError(self._manifest.file or "manifest", [Problem(line, 1, message, remedy)])

    def _names(self, entry: ManifestInput, number: int) -> list[str]:
        """Absolute names; patterns and `.` are expanded."""
        if entry.path in (".", "./"):
            return self._whole_folder(number)
        path = os.path.normpath(os.path.join(self._workdir, entry.path))
        outside = not path.startswith(self._workdir.rstrip("/") + "/")
        shown = escape(entry.path)
        if path == self._workdir or (outside and not entry.path.startswith("/")):
            self._fail(
                number, f"The input {shown} leaves the notebook's folder.", "Name it by its absolute path."
            )
        if outside and self._policy.forbidden_inputs_outside:
            self._fail(number, f"The policy allows no input outside the notebook's folder, as {shown} is.")
        if not glob.has_magic(entry.path):
            return [path]
        names = sorted(glob.glob(path, recursive=True))
        if not names:
            self._fail(
                number, f"No file matches the input {shown}.", "Correct the pattern, or create the file."
            )
        return names

    def _whole_folder(self, number: int) -> list[str]:
        """`.`: every entry of the folder, so that scratch can be its floor."""
        try:
            names = sorted(os.listdir(self._workdir))
        except OSError as error:
            self._fail(number, f"The notebook's folder cannot be listed: {error.strerror}.")
        first = (
            None
            if self._outputs is None
            else self._outputs[len(self._workdir.rstrip("/")) + 1 :].split("/")[0]
        )
        return [
            os.path.join(self._workdir, name) for name in names if name not in (first, ".ipynb_checkpoints")
        ]

    def _add(self, path: str, entry: ManifestInput, number: int) -> None:
        shown = escape(path)
        real = os.path.realpath(path)
        try:
            found = os.lstat(real)
        except OSError as error:
            self._fail(
                number,
                f"The input {shown} cannot be used: {error.strerror}.",
                "Correct the name, or create it.",
            )
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            self._fail(
                number, f"The input {shown} is neither a file nor a folder.", "Name what the notebook reads."
            )
        kind: Literal["file", "directory"] = "directory" if stat.S_ISDIR(found.st_mode) else "file"
        if entry.sha256 is not None and kind == "directory":
            self._fail(number, f"The input {shown} is a folder and cannot have a sha256.", "Name its files.")
        if self._outputs is not None and (path + "/").startswith(self._outputs + "/"):
            self._fail(
                number, f"The input {shown} lies in the outputs folder.", "Choose another outputs.path."
            )
        if self._approved is not None and self._approved.get(path, real) != real:
            raise RefusedError(
                f"The input {shown} led to {escape(self._approved[path])} when it was approved, and leads to "
                f"{escape(real)} now.",
                "Look at it, then approve the notebook again: jupyter glovebox approve NOTEBOOK",
            )
        if len(self._found) >= _MOST_INPUTS:
            self._fail(
                number, f"The inputs name more than {_MOST_INPUTS} files.", "Name their folder instead."
            )
        self._found[path] = InputGrant(
            path=path,
            source=real,
            kind=kind,
            sha256=entry.sha256,
            identity=SourceIdentity(
                device=found.st_dev, inode=found.st_ino, mtime_ns=found.st_mtime_ns, size=found.st_size
            ),
        )

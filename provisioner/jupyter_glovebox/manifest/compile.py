"""From manifest and policy to a plan.

A manifest that asks for more than policy allows is an error that names both; nothing is lowered in
silence. Only defaults, which nobody wrote, follow the ceiling down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import RefusedError, UsageError
from ..ledger.events import escape
from . import approvals
from .fields import Problem
from .inputs import Inputs
from .loading import ManifestError, load_manifest
from .model import DEFAULT_OUTPUTS, STRICTNESS, WORKLOADS, Manifest, Policy
from .plan import Budgets, Outputs, Plan, Scratch, Workload
from .policy import current_policy, policy_for

ApprovalKind = Literal["none", "caller", "click", "code"]
# Accepted and checked, so that a manifest can be written for a later version; no gate enforces them yet.
_NOT_BUILT = ("network", "operations", "credentials", "devices", "display", "budgets.display",
              "outputs.inputs_copied")  # fmt: skip


@dataclass(frozen=True)
class Resolution:
    """A plan and where it came from. `notice` says why it is not more, in one or two sentences.

    `policy` is the ceiling that held, for `explain`.
    """

    plan: Plan
    manifest_file: Path | None = None
    notice: str = ""
    policy: Policy | None = None


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

    With `manifest_file` and `caller_approves` that manifest counts. Otherwise `manifest_file`, else the one
    beside the notebook, counts if it is approved as it stands; else the baseline, with a notice.

    Raises:
        UsageError: the notebook is missing or is none.
        ManifestError: the manifest or the policy is not valid, or asks for more than policy allows.
        RefusedError: policy or a change since the approval refuses the start.
    """
    if notebook is not None:
        notebook = _real_notebook(notebook)
    folder = _real(workdir or (notebook.parent if notebook is not None else Path.cwd()))
    policy = policy_for(current_policy(), str(notebook or folder))
    if manifest_file is not None and caller_approves:
        manifest = load_manifest(manifest_file)
        plan = compile_plan(manifest, policy, notebook=notebook, workdir=folder, approval="caller")
        return Resolution(plan, manifest_file, policy=policy)
    beside, notice = None, ""
    if notebook is not None and not baseline:
        beside = manifest_file or find_manifest(notebook)
        approval = approvals.find(notebook)
        approved, notice = _approved(notebook, beside, approval, policy)
        if approved is not None and approval is not None:
            plan = compile_plan(
                approved,
                policy,
                notebook=notebook,
                workdir=folder,
                approval=approval.method,
                approved=approval.sources,
            )
            return Resolution(plan, beside, policy=policy)
    if policy.baseline == "refuse":
        raise RefusedError(
            f"The policy {policy.file} starts no notebook without an approved manifest. {notice}".strip(),
            "Write a manifest (jupyter glovebox init NOTEBOOK) and approve it (jupyter glovebox approve NOTEBOOK).",
        )
    plan = compile_plan(None, policy, notebook=notebook, workdir=folder, approval="none")
    return Resolution(plan, beside, notice, policy)


def _approved(
    notebook: Path, beside: Path | None, approval: approvals.Approval | None, policy: Policy
) -> tuple[Manifest | None, str]:
    """The manifest if it is approved as it stands, else why it does not count and what to do."""
    name = escape(str(notebook))
    baseline = f"{name} runs on the baseline (no inputs, no outputs, no network)."
    if beside is None:
        return None, f"No manifest: {baseline} Draft one with: jupyter glovebox init {name}"
    file = escape(beside.name)
    look = f"Look at it and approve it with: jupyter glovebox approve {name}"
    if approval is None:
        return None, f"The manifest {file} is not approved: {baseline} {look}"
    if policy.approval == "code" and approval.method == "click":
        return (
            None,
            f"The manifest {file} was approved without the code that policy asks for: {baseline} {look}",
        )
    try:
        manifest = load_manifest(beside)
    except ManifestError as error:
        first = error.problems[0]
        return None, (
            f"The manifest {file} has changed since it was approved, and is not valid (line {first.line}: "
            f"{first.message}): {baseline} Check it with: jupyter glovebox check {escape(str(beside))}"
        )
    if manifest.digest != approval.manifest:
        return None, f"The manifest {file} has changed since it was approved: {baseline} {look}"
    return manifest, ""


def _real(path: Path) -> Path:
    try:
        real = os.path.realpath(path)
        real.encode()
    except ValueError as error:  # a NUL, or bytes that are no text
        raise UsageError(
            f"The name {escape(str(path))} is not UTF-8 text.", "Rename it, or work in another folder."
        ) from error
    return Path(real)


def _real_notebook(notebook: Path) -> Path:
    real = _real(notebook)
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
        RefusedError: policy asks for what this version has not, or an input leads elsewhere than when it
            was approved.
    """
    asked = manifest or Manifest(name="baseline")
    limits = _Limits(asked, policy)
    workload = limits.workload()
    outputs = limits.outputs(str(workdir))
    limits.not_built()
    limits.finish()
    inputs = Inputs(asked, str(workdir), outputs, policy, approved).grants()
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
    """Compares what is asked with the ceilings; problems carry the place of the key."""

    def __init__(self, manifest: Manifest, policy: Policy) -> None:
        self._manifest = manifest
        self._policy = policy
        self._where = f"the policy {policy.file}" if policy.file else "the built-in policy"
        self._problems: list[Problem] = []
        asked = manifest.budgets
        if "budgets.cpus" not in manifest.places:
            asked = msgspec.structs.replace(asked, cpus=min(asked.cpus, float(len(os.sched_getaffinity(0)))))
        self._budgets = {
            name: self._one(f"budgets.{name}", getattr(asked, name), getattr(policy.budgets, name))
            for name in Budgets.__struct_fields__
        }
        self._scratch = self._one("scratch.size", manifest.scratch.size, policy.scratch)

    def _bad(self, key: str, message: str, remedy: str) -> None:
        places = self._manifest.places
        line, column = places.get(key) or places.get(key.partition(".")[0]) or (1, 1)
        self._problems.append(Problem(line, column, message, remedy))

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
        if self._policy.isolation[chosen] == "gvisor":
            raise RefusedError(
                f"{self._where} wants the isolation `gvisor` for {chosen}, which is not available in this version.",
                f"Set `isolation: {{{chosen}: bubblewrap}}` there.",
            )
        if self._manifest.isolation == "gvisor":
            self._bad(
                "isolation", "The isolation `gvisor` is not available in this version.", "Use bubblewrap."
            )
        return chosen

    def outputs(self, workdir: str) -> Outputs | None:
        asked, most = self._manifest.outputs, self._policy.outputs
        if asked is None:
            return None
        place = os.path.normpath(os.path.join(workdir, asked.path))
        if os.path.realpath(place) != place:
            self._bad(
                "outputs.path",
                f"`{asked.path}` in the notebook's folder is a link, or lies behind one: results would go elsewhere.",
                "Remove the link, or choose another outputs.path.",
            )
        values = {
            name: self._one(f"outputs.{name}", getattr(asked, name), getattr(most, name))
            for name in ("max_files", "max_file_size", "max_total_size")
        }
        for name, order in STRICTNESS.items():
            values[name] = self._at_least(f"outputs.{name}", getattr(asked, name), getattr(most, name), order)
        more = [t for t in asked.types if t not in most.types]
        if more and "outputs.types" in self._manifest.places:
            self._bad("outputs.types", f"{self._where} does not let {', '.join(more)} leave.", "Remove it.")
        types = tuple(t for t in asked.types if t in most.types)
        return msgspec.structs.replace(asked, types=types, **values)

    def _at_least(self, key: str, asked: str, weakest: str, order: tuple[str, ...]) -> str:
        """The stricter of two words; a written one that is laxer than policy is an error."""
        if order.index(asked) >= order.index(weakest):
            return asked
        if key in self._manifest.places:
            self._bad(
                key, f"`{key}: {asked}` is laxer than {self._where} allows ({weakest}).", "Remove the key."
            )
        return weakest

    def not_built(self) -> None:
        places = self._manifest.places
        for key in _NOT_BUILT:
            # An empty list asks for nothing.
            if key in places and getattr(self._manifest, key, True) != ():
                self._bad(
                    key,
                    f"`{key}` is not available in this version: nothing can enforce it yet.",
                    f"Remove `{key}`.",
                )
        if self._manifest.observation == "strict":
            self._bad(
                "observation", "`observation: strict` is not available in this version.", "Use standard."
            )

    def finish(self) -> None:
        if self._problems:
            raise ManifestError(self._manifest.file or "manifest", self._problems)


def _plain(key: str, value: Any) -> str:
    name = key.rpartition(".")[2]
    if name in ("memory", "display", "size") or name.endswith("_size"):
        return f"{value / (1 << 20):g}M"
    return f"{value:g}s" if name in ("cpu_time", "wall_time") else f"{value:g}"

"""A plan in plain words: what a notebook may do, what ends it, and why not more."""

from __future__ import annotations

from ..ledger.events import escape
from .model import Policy
from .plan import Plan


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:g} {unit}" if count % factor == 0 else f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _time(seconds: float) -> str:
    for unit, factor in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds:g} seconds"


def explain(plan: Plan, policy: Policy | None = None) -> str:
    """Several lines of plain text; hostile names are escaped.

    Args:
        plan: the compiled plan.
        policy: the ceiling it was compiled under; with it, the text says what a manifest could ask for.
    """
    who = escape(plan.notebook) if plan.notebook else f"A command in {escape(plan.workdir)}"
    title = f"{who}, baseline" if plan.baseline else f"{who}, manifest `{escape(plan.name)}`"
    return "\n".join(
        [
            title,
            "",
            *_reads(plan),
            *_writes(plan),
            *_reaches(plan),
            *_budgets(plan),
            *([] if policy is None else _ceiling(policy)),
            "",
            *_rest(plan),
        ]
    )


def _reads(plan: Plan) -> list[str]:
    if not plan.inputs:
        return ["Reads:    nothing of yours; only the installed programs and libraries"]
    lines = [f"Reads:    {len(plan.inputs)} input{'s' if len(plan.inputs) > 1 else ''}, read-only:"]
    for grant in plan.inputs[:40]:
        real = f" (really {escape(grant.source)})" if grant.source != grant.path else ""
        pinned = ", only with its pinned digest" if grant.sha256 else ""
        kind = "folder " if grant.kind == "directory" else ""
        lines.append(f"            {kind}{escape(grant.path)}{real}{pinned}")
    if len(plan.inputs) > 40:
        lines.append(f"            and {len(plan.inputs) - 40} more")
    return lines


def _writes(plan: Plan) -> list[str]:
    place = "in memory" if plan.scratch.on == "memory" else "on disk"
    lines = [f"Writes:   a working folder of {_size(plan.scratch.size)} {place}, gone at the end"]
    outputs = plan.outputs
    if outputs is None:
        return [*lines, "Exports:  nothing; add `outputs` to the manifest to keep results"]
    what = (
        "every new file in the working folder" if outputs.path == "." else f"files in {escape(outputs.path)}/"
    )
    types = ", ".join(outputs.types) or "no type at all"
    return [
        *lines,
        f"Exports:  {what}, after a check: at most {outputs.max_files} files of {_size(outputs.max_file_size)}, "
        f"{_size(outputs.max_total_size)} together; types: {types}",
    ]


def _reaches(plan: Plan) -> list[str]:
    hosts = ", ".join(f"{rule.protocol}://{escape(rule.host)}:{rule.port}" for rule in plan.network)
    return [f"Network:  {hosts or 'none, not even name lookups'}"]


def _budgets(plan: Plan) -> list[str]:
    b = plan.budgets
    return [
        f"Ends at:  {_size(b.memory)} memory; {_time(b.cpu_time)} processor time on {b.cpus:g} cores; "
        f"{_time(b.wall_time)} in all",
        f"Limits:   {b.processes} processes and threads, {b.open_files} open files each",
    ]


def _ceiling(policy: Policy) -> list[str]:
    """Why not more: what is not granted was not asked for, up to here."""
    b, out = policy.budgets, policy.outputs
    whose = f"the policy {escape(policy.file)}" if policy.file else "the built-in policy"
    lines = [
        f"Could be: a manifest may ask for more, up to what {whose} allows: {_size(b.memory)} memory, {b.cpus:g} "
        f"cores, {_time(b.cpu_time)} processor time, {_time(b.wall_time)} in all, {b.processes} processes, "
        f"{_size(policy.scratch)} scratch; {out.max_files} results of {_size(out.max_file_size)}, "
        f"{_size(out.max_total_size)} together",
    ]
    if policy.forbidden_inputs_outside:
        lines.append("          Inputs outside the notebook's folder are forbidden there.")
    if policy.forbidden_mounts:
        lines.append(f"          Never inputs: {', '.join(map(escape, policy.forbidden_mounts))}")
    return lines


def _rest(plan: Plan) -> list[str]:
    how = {
        "none": "no approval",
        "caller": "the caller's own manifest",
        "click": "approved by a click",
        "code": "approved on the command line or with a code",
    }[plan.approval]
    lines = [f"Isolation {plan.isolation}; code regarded as {plan.workload}; {how}; plan {plan.digest[:19]}…"]
    if plan.environment:
        lines.append("Sets:     " + ", ".join(f"{k}={escape(v)}" for k, v in plan.environment.items()))
    if plan.require:
        lines.append(f"Starts only where these are enforced: {', '.join(plan.require)}")
    lines.append("Everything else is denied: other files, your credentials, the network, other processes.")
    return lines

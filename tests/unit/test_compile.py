"""From manifest and policy to a plan: never more than policy allows, and the same every time."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_glovebox.errors import GloveboxError, RefusedError, UsageError
from jupyter_glovebox.ledger.events import Event
from jupyter_glovebox.locations import state_dir
from jupyter_glovebox.manifest import approvals, policy
from jupyter_glovebox.manifest.compile import compile_plan, find_manifest, resolve
from jupyter_glovebox.manifest.draft import draft_manifest
from jupyter_glovebox.manifest.explain import explain
from jupyter_glovebox.manifest.loading import ManifestError, parse_manifest, parse_policy
from jupyter_glovebox.manifest.model import TYPES, Policy
from jupyter_glovebox.manifest.plan import Plan

HEAD = "version: 1\nname: x\n"


def plan_of(text: str, folder: Path, limits: str = "version: 1\n", **arguments: Any) -> Plan:
    return compile_plan(
        parse_manifest(HEAD + text, "m.yaml"), parse_policy(limits, "policy.yaml"),
        notebook=None, workdir=folder, approval="caller", **arguments,
    )  # fmt: skip


_SIZES = st.integers(1, 64 << 10).map(lambda n: f"{n}M")
_TIMES = st.integers(1, 10_000).map(lambda n: f"{n}m")
_BUDGETS = st.fixed_dictionaries(
    {}, optional={"memory": _SIZES, "cpus": st.integers(1, 64), "cpu_time": _TIMES, "wall_time": _TIMES,
                  "processes": st.integers(8, 9999), "open_files": st.integers(64, 99999), "display": _SIZES},
)  # fmt: skip
_OUTPUTS = st.fixed_dictionaries(
    {}, optional={"max_files": st.integers(1, 1000), "max_file_size": _SIZES, "max_total_size": _SIZES,
                  "types": st.lists(st.sampled_from(TYPES), unique=True)},
)  # fmt: skip
_WORKLOADS = st.sampled_from(["trusted-adapter", "generated-code", "third-party-binary"])
_MANIFESTS = st.fixed_dictionaries(
    {}, optional={"budgets": _BUDGETS, "outputs": _OUTPUTS, "scratch": st.fixed_dictionaries({"size": _SIZES}),
                  "workload": _WORKLOADS, "require": st.just(["memory"])},
)  # fmt: skip
_POLICIES = st.fixed_dictionaries(
    {}, optional={"budgets": _BUDGETS, "outputs": _OUTPUTS, "scratch": _SIZES, "workload": _WORKLOADS,
                  "require": st.just(["network"]), "denials": st.sampled_from(["explicit", "uniform"])},
)  # fmt: skip


@given(_MANIFESTS, _POLICIES)
@settings(max_examples=300, deadline=None)
def test_never_more_than_policy_allows(asked: dict[str, Any], limits: dict[str, Any]) -> None:
    text = HEAD + "".join(f"{k}: {json.dumps(v)}\n" for k, v in asked.items())
    rules = parse_policy("version: 1\n" + "".join(f"{k}: {json.dumps(v)}\n" for k, v in limits.items()))
    arguments: dict[str, Any] = {"notebook": None, "workdir": Path("/nowhere"), "approval": "caller"}
    try:
        plan = compile_plan(parse_manifest(text), rules, **arguments)
    except ManifestError as error:
        assert error.problems
        return
    for name in rules.budgets.__struct_fields__:
        assert getattr(plan.budgets, name) <= getattr(rules.budgets, name)
    assert plan.scratch.size <= rules.scratch
    if plan.outputs is not None:
        for name in ("max_files", "max_file_size", "max_total_size"):
            assert getattr(plan.outputs, name) <= getattr(rules.outputs, name)
        assert set(plan.outputs.types) <= set(rules.outputs.types)
    assert set(rules.require) <= set(plan.require)
    order = ["trusted-adapter", "generated-code", "third-party-binary"]
    assert order.index(plan.workload) >= order.index(rules.workload)
    assert plan.denials == rules.denials
    assert not plan.network
    again = compile_plan(parse_manifest(text), rules, **arguments)
    assert (again.digest, again.to_json()) == (plan.digest, plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan


def test_excess_is_an_error_that_names_all(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        plan_of("budgets:\n  memory: 4G\n", tmp_path, "version: 1\nbudgets: {memory: 1G}\n")
    (problem,) = caught.value.problems
    assert problem.line == 4
    for word in ("budgets.memory", "4096M", "1024M", "policy.yaml"):
        assert word in problem.message


def test_defaults_follow_the_ceiling_down(tmp_path: Path) -> None:
    plan = plan_of("", tmp_path, "version: 1\nbudgets: {memory: 1G}\nscratch: 100M\n")
    assert plan.budgets.memory == 1 << 30
    assert plan.scratch.size == 100 << 20


@pytest.mark.parametrize(
    "text",
    [
        "network: [{host: a.example}]\n",
        "operations: [query-dataset]\n",
        "credentials: [{name: A, use: a.example}]\n",
        "devices: [gpu]\n",
        "isolation: gvisor\n",
        "observation: strict\n",
        "environment: {LD_PRELOAD: /tmp/x.so}\n",
        "environment: {PATH: /tmp}\n",
        "environment: {JUPYTER_TOKEN: x}\n",
        "workload: trusted-adapter\n",
        "outputs: {path: ../elsewhere}\n",
        "outputs: {path: /tmp}\n",
        "outputs: {path: .git/hooks}\n",
        "outputs: {path: a/.ipython}\n",
    ],
)
def test_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        plan_of(text, tmp_path)


def test_an_outputs_folder_that_is_a_link(tmp_path: Path) -> None:
    """A folder that somebody sent could hold `outputs` as a link to ~/.ssh."""
    work = tmp_path / "work"
    work.mkdir()
    assert plan_of("outputs: {path: outputs}\n", work).outputs
    (work / "outputs").symlink_to(tmp_path)
    with pytest.raises(ManifestError, match="link"):
        plan_of("outputs: {path: outputs}\n", work)
    with pytest.raises(ManifestError, match="link"):
        plan_of("outputs: {path: outputs/inner}\n", work)


def test_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    for name in ("data/a.csv", "data/b.csv", "c.txt"):
        (work / name).write_text(name)
    (work / "link.txt").symlink_to("c.txt")
    plan = plan_of("inputs: [data/*.csv, link.txt]\n", work)
    assert [(Path(i.path).name, Path(i.source).name) for i in plan.inputs] == [
        ("a.csv", "a.csv"),
        ("b.csv", "b.csv"),
        ("link.txt", "c.txt"),
    ]
    whole = plan_of("inputs: [.]\noutputs: {path: out}\n", work)
    assert [Path(i.path).name for i in whole.inputs] == ["c.txt", "data", "link.txt"]
    before = plan.digest
    os.utime(work / "c.txt", (1, 1))
    assert plan_of("inputs: [data/*.csv, link.txt]\n", work).digest == before
    for bad in ("../work2", "missing.csv", "*.none", "data/../..", "outputs/x"):
        with pytest.raises(ManifestError):
            plan_of(f"inputs: ['{bad}']\noutputs: {{path: outputs}}\n", work)
    os.mkfifo(work / "fifo")
    with pytest.raises(ManifestError, match="neither a file nor a folder"):
        plan_of("inputs: [fifo]\n", work)
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(work)  # a socket's name is short
        listener.bind("sock")
        with pytest.raises(ManifestError, match="neither a file nor a folder"):
            plan_of("inputs: [sock]\n", work)


def test_policy_that_allows_no_input_outside(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "x").write_text("x")
    with pytest.raises(ManifestError):
        plan_of(
            f"inputs: ['{tmp_path}/x']\n", tmp_path / "work", "version: 1\nforbidden_inputs_outside: true\n"
        )


def test_rules_by_path_and_user() -> None:
    rules = parse_policy(
        "version: 1\nrules:\n- {match: {path: /srv/class/**}, baseline: refuse}\n"
        "- {match: {path: /srv/class/**, user: [ada]}, baseline: allow, budgets: {memory: 1G}}\n"
        "- {match: {path: /srv/*/x.ipynb}, denials: uniform}\n"
    )
    assert policy.policy_for(rules, "/home/x.ipynb", user="bob").baseline == "allow"
    assert policy.policy_for(rules, "/srv/class/a/b.ipynb", user="bob").baseline == "refuse"
    assert policy.policy_for(rules, "/srv/classes/b.ipynb", user="bob").baseline == "allow"
    ada = policy.policy_for(rules, "/srv/class/x.ipynb", user="ada")
    assert (ada.baseline, ada.budgets.memory, ada.denials) == ("allow", 1 << 30, "uniform")


def test_the_admins_policy_must_be_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nbaseline: refuse\n")
    tmp_path.chmod(0o755)
    monkeypatch.setattr(policy, "ADMIN_POLICY", file)
    file.chmod(0o666)
    with pytest.raises(RefusedError):
        policy.current_policy()
    file.chmod(0o644)
    if os.getuid() == 0:
        assert policy.current_policy().baseline == "refuse"
    file.unlink()
    assert policy.current_policy() == Policy()
    file.symlink_to("/nowhere")
    with pytest.raises((RefusedError, ManifestError)):
        policy.current_policy()


def _notebook(path: Path, *cells: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), path)
    return path


def test_resolve_follows_the_rules(tmp_path: Path) -> None:
    path = _notebook(tmp_path / "n.ipynb")
    assert "No manifest" in resolve(path).notice
    assert resolve(path).plan.baseline
    (tmp_path / "glovebox.yaml").write_text(HEAD)
    assert find_manifest(path) == tmp_path / "glovebox.yaml"
    manifest = tmp_path / "n.glovebox.yaml"
    manifest.write_text(HEAD + "scratch: {size: 1M}\n")
    assert find_manifest(path) == manifest
    assert "not approved" in resolve(path).notice
    assert resolve(path, manifest_file=manifest, caller_approves=True).plan.approval == "caller"
    approvals.approve(path, manifest)
    assert resolve(path).plan.scratch.size == 1 << 20
    assert (state_dir() / "approvals.json").stat().st_mode & 0o777 == 0o600
    manifest.write_text(HEAD + "scratch: {size: 2M}\n")
    assert "changed" in resolve(path).notice
    assert resolve(path).plan.baseline
    assert approvals.revoke(path)
    assert not approvals.revoke(path)
    for bad in ("missing.ipynb", "."):
        with pytest.raises(UsageError):
            resolve(tmp_path / bad)


def test_damaged_approvals_never_count_as_none(tmp_path: Path) -> None:
    (state_dir() / "approvals.json").write_text("{")
    with pytest.raises(GloveboxError, match="approvals"):
        approvals.stored()


def _approve(folder: str, number: int) -> None:
    path = Path(folder) / f"n{number}.ipynb"
    path.write_text("{}")
    approvals.approve(path, Path(folder) / "m.yaml")


def test_many_approve_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(HEAD)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_approve, args=(str(tmp_path), n)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(approvals.stored()) == 6


def test_drafts_load_compile_and_name_nothing_private(tmp_path: Path) -> None:
    for name in ("data.csv", "other.csv", ".env", "id_rsa"):
        (tmp_path / name).write_text("x")
    path = _notebook(
        tmp_path / "näme 1.ipynb",
        "import pandas as pd\ndf = pd.read_csv('data.csv')\nopen('.env'); open('id_rsa')",
        "df.to_csv('results/clean.csv')\nplt.savefig('results/a.png')\n!ls\n%matplotlib inline",
        "this is no python (",
    )
    event = Event(time=0, event_class="not-granted", operation="open", target=str(tmp_path / "other.csv"),
                  kernel_id="k", notebook=None, plan="p")  # fmt: skip
    text = draft_manifest(path, [event])
    manifest = parse_manifest(text)
    assert [i.path for i in manifest.inputs] == ["data.csv", "other.csv"]
    assert manifest.outputs
    assert (manifest.outputs.path, manifest.outputs.types) == ("results", ("csv", "png"))
    assert compile_plan(manifest, Policy(), notebook=path, workdir=tmp_path, approval="caller").inputs


def test_explain_is_safe_to_print(tmp_path: Path) -> None:
    name = "a\x1b[31m\u202e.csv"
    (tmp_path / name).write_text("x")
    plan = plan_of(f"inputs: [{json.dumps(str(tmp_path / '*.csv'))}]\n", tmp_path)
    text = explain(plan)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b" in text
    assert "none" in text
    assert msgspec.json.decode(plan.to_json())["inputs"][0]["path"].endswith(name)

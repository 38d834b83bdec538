"""Policies: which one holds, for whom, and what a manifest under it may say."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_glovebox.errors import RefusedError
from jupyter_glovebox.locations import config_dir
from jupyter_glovebox.manifest import policy
from jupyter_glovebox.manifest.compile import compile_plan
from jupyter_glovebox.manifest.loading import ManifestError, load_policy, parse_manifest, parse_policy
from jupyter_glovebox.manifest.model import Policy
from jupyter_glovebox.manifest.plan import Plan

HEAD = "version: 1\n"
ROOT = Path(__file__).resolve().parents[2]


def plan_of(text: str, limits: str) -> Plan:
    return compile_plan(
        parse_manifest(f"{HEAD}name: x\n{text}"), parse_policy(HEAD + limits, "policy.yaml"),
        notebook=None, workdir=Path("/nowhere"), approval="caller",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("/srv/class/a.ipynb", "/srv/class/**", True),
        ("/srv/class", "/srv/class/**", True),
        ("/srv/class/a/b/c.ipynb", "/srv/class/**", True),
        ("/srv/class2/a.ipynb", "/srv/class/**", False),
        ("/srv/x/exam/a.ipynb", "/srv/**/exam/*.ipynb", True),
        ("/srv/exam/a.ipynb", "/srv/**/exam/*.ipynb", True),
        ("/srv/x/exam/b/a.ipynb", "/srv/**/exam/*.ipynb", False),
        ("/home/ada/a.ipynb", "/home/*/a.ipynb", True),
        ("/home/ada/x/a.ipynb", "/home/*/a.ipynb", False),
        ("/a/b/c/d", "/**/c/**", True),
        ("/a/b/d", "/**/c/**", False),
        ("/srv/class/a.ipynb", "/srv//class/", False),
        ("/srv/class", "/srv//class/", True),
    ],
)
def test_path_selectors(path: str, pattern: str, matches: bool) -> None:
    rules = parse_policy(f"{HEAD}rules: [{{match: {{path: '{pattern}'}}, baseline: refuse}}]\n")
    assert (policy.policy_for(rules, path, user="x").baseline == "refuse") == matches


def test_user_and_group_selectors() -> None:
    me = pwd.getpwuid(os.getuid())
    rules = parse_policy(
        f"{HEAD}rules:\n- {{match: {{group: [no-such-group]}}, baseline: refuse}}\n"
        f"- {{match: {{group: [{policy.grp.getgrgid(me.pw_gid).gr_name}]}}, denials: uniform}}\n"
        f"- {{match: {{user: ['DOMAIN\\somebody', {me.pw_name}]}}, approval: code}}\n"
    )
    mine = policy.policy_for(rules, "/x.ipynb")
    assert (mine.baseline, mine.denials, mine.approval) == ("allow", "uniform", "code")
    nobody = policy.policy_for(rules, "/x.ipynb", user="no-such-user")
    assert (nobody.denials, nobody.approval) == ("explicit", "click")


def test_who_we_are_is_not_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    assert policy.user_name() == pwd.getpwuid(os.getuid()).pw_name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules: [{match: {}, baseline: refuse}]\n", "names nothing"),
        ("rules: [{match: {path: 'class/**'}}]\n", "absolute"),
        ("rules: [{match: {path: '/srv/../etc'}}]\n", "absolute"),
        ("rules: [{baseline: refuse}]\n", "match"),
        ("forbidden_mounts: [data]\n", "absolute"),
        ("download: verified\n", "not available in this version"),
        ("credentials: [x]\n", "not available in this version"),
        ("rules: [{match: {user: [x]}, operations: [y]}]\n", "not available in this version"),
        ("scratch: {size: 1G}\n", "size"),
        ("bugdets: {}\n", "budgets"),
    ],
)
def test_what_is_no_policy(text: str, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_policy(HEAD + text)
    assert words in caught.value.message


def test_the_users_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(policy, "ADMIN_POLICY", tmp_path / "none/policy.yaml")
    assert policy.current_policy() == Policy()
    config_dir().mkdir(parents=True)
    own = config_dir() / "policy.yaml"
    own.write_text(HEAD + "scratch: 1G\n")
    assert policy.current_policy().scratch == 1 << 30
    own.unlink()
    own.symlink_to("nowhere")
    with pytest.raises(ManifestError):
        policy.current_policy()


_AS_NOBODY = """
import os, sys, unicodedata
from pathlib import Path
from jupyter_glovebox.manifest import policy
from jupyter_glovebox.errors import GloveboxError
# Only now: root's Python may be unreadable to others.
os.setgroups([]); os.setgid(65534); os.setuid(65534)
policy.ADMIN_POLICY = Path(sys.argv[1])
try:
    print("policy", policy.current_policy().baseline)
except GloveboxError as error:
    print(type(error).__name__, error.message)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="makes a folder of root's")
def test_a_policy_that_cannot_be_seen_is_not_none(tmp_path: Path) -> None:
    """The folder is closed to the user: not finding the policy must not mean that there is none."""
    folder = tmp_path / "etc"
    folder.mkdir()
    file = folder / "policy.yaml"
    file.write_text(HEAD + "baseline: refuse\n")
    for above in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        above.chmod(0o755)

    def seen() -> str:
        return subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, str(file)], capture_output=True, text=True, check=True,
            env={**os.environ, "HOME": "/nonexistent", "JUPYTER_GLOVEBOX_CONFIG_DIR": str(tmp_path / "config")},
        ).stdout.strip()  # fmt: skip

    assert seen() == "policy refuse"
    file.chmod(0o600)
    assert seen().startswith("ManifestError")
    file.chmod(0o644)
    folder.chmod(0o700)
    assert seen().startswith("RefusedError")
    folder.chmod(0o755)
    file.unlink()
    assert seen() == "policy allow"


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of root's")
def test_a_policy_below_somebodys_folder_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    (folder / "policy.yaml").write_text(HEAD)
    monkeypatch.setattr(policy, "ADMIN_POLICY", folder / "policy.yaml")
    assert policy.current_policy().denials == "uniform", "a managed policy tells tenants nothing"
    (folder / "policy.yaml").write_text(HEAD + "denials: explicit\n")
    assert policy.current_policy().denials == "explicit"
    os.chown(tmp_path / "a", 65534, 65534)
    with pytest.raises(RefusedError, match="/a must belong to root"):
        policy.current_policy()


@pytest.mark.parametrize("key", ["formulas", "secrets", "inputs_copied"])
def test_findings_are_at_least_as_strict_as_policy(key: str) -> None:
    strict = f"outputs: {{{key}: reject}}\n"
    plan = plan_of("outputs: {}\n", strict)
    assert plan.outputs
    assert getattr(plan.outputs, key) == "reject"
    if key == "inputs_copied":
        return  # a manifest cannot choose it in this version
    for choice in ("allow", "reject"):
        chosen = plan_of(f"outputs: {{{key}: {choice}}}\n", "").outputs
        assert chosen
        assert getattr(chosen, key) == choice
    with pytest.raises(ManifestError, match="laxer"):
        plan_of(f"outputs: {{{key}: allow}}\n", strict)


def test_types_follow_policy_only_when_nobody_wrote_them() -> None:
    plan = plan_of("outputs: {}\n", "outputs: {types: [csv]}\n")
    assert plan.outputs
    assert plan.outputs.types == ("csv",)
    with pytest.raises(ManifestError, match="png"):
        plan_of("outputs: {types: [csv, png]}\n", "outputs: {types: [csv]}\n")


def test_an_isolation_that_is_not_there_is_the_policys_fault() -> None:
    with pytest.raises(RefusedError, match=r"policy\.yaml"):
        plan_of("", "isolation: {generated-code: gvisor}\n")
    assert plan_of("", "isolation: {trusted-adapter: gvisor}\n").isolation == "bubblewrap"


@pytest.mark.parametrize("path", sorted((ROOT / "manifests").glob("policy*.yaml")), ids=lambda p: p.name)
def test_ready_policies(path: Path) -> None:
    import jsonschema
    import yaml
    from jupyter_glovebox.manifest import schema

    load_policy(path)
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(json.dumps(schema.policy_schema())))

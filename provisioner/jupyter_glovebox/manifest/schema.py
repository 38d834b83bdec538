"""Generates the JSON Schema and the commented sample policy in `manifests/`.

    python -m jupyter_glovebox.manifest.schema DIR

Source: JSON Schema 2020-12.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .fields import Section
from .model import CEILINGS, MANIFEST, OUTPUTS_CEILING, POLICY, SCRATCH_CEILING, Policy

_ID = "https://jupyter-glovebox.readthedocs.io/schemas"


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of manifests."""
    return _schema(MANIFEST, "manifest", "Jupyter Glovebox manifest, version 1")


def policy_schema() -> dict[str, Any]:
    """JSON Schema of policies."""
    return _schema(POLICY, "policy", "Jupyter Glovebox policy, version 1")


def _schema(section: Section, name: str, title: str) -> dict[str, Any]:
    schema = section.schema()
    # The number 1 is what people write; the loader reads scalars as text.
    schema["properties"]["version"] = {"const": 1, "description": "version of this format"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{_ID}/{name}-1.json",
        "title": title,
        **schema,
    }


def sample_policy() -> str:
    """The built-in policy, written out with every key commented. It parses to the same values."""
    policy = Policy()
    words = {name: key.words for name, key in POLICY.keys.items()}
    out = POLICY_HEAD.splitlines()
    values: list[tuple[str, str]] = [
        ("enforce", "true"),
        ("baseline", policy.baseline),
        ("workload", policy.workload),
        ("isolation", _flow(policy.isolation)),
        ("require", "[]"),
        ("denials", policy.denials),
        ("approval", policy.approval),
        ("forbidden_mounts", "[]"),
        ("forbidden_inputs_outside", "false"),
        ("scratch", _size(SCRATCH_CEILING)),
    ]
    for name, value in values:
        out += [f"# {words[name]}", f"{name}: {value}", ""]
    out += [f"# {words['outputs']}", "outputs:"]
    for name in ("max_files", "max_file_size", "max_total_size"):
        value = getattr(OUTPUTS_CEILING, name)
        out.append(f"  {name}: {value if name == 'max_files' else _size(value)}")
    out += [f"  types: [{', '.join(OUTPUTS_CEILING.types)}]", "", f"# {words['budgets']}", "budgets:"]
    for name in CEILINGS.__struct_fields__:
        value = getattr(CEILINGS, name)
        shown = (
            _size(value)
            if name in ("memory", "display")
            else f"{value:g}s"
            if name.endswith("time")
            else f"{value:g}"
        )
        out.append(f"  {name}: {shown}")
    out += ["", f"# {words['rules']}", *POLICY_RULES.splitlines(), "rules: []", ""]
    return "\n".join(out)


POLICY_HEAD = """\
# Policy: the ceiling for every manifest. These are the values that hold without a policy.
#
# Managed machines: /etc/jupyter-glovebox/policy.yaml, owned by root and writable by root alone.
# Your own: ~/.config/jupyter-glovebox/policy.yaml (not looked at where the managed one exists).
version: 1
"""
POLICY_RULES = """\
# - match: {path: /srv/class/**, group: [students]}
#   baseline: refuse
#   budgets: {memory: 1G, wall_time: 1h}"""


def _flow(values: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{k}: {v}" for k, v in values.items()) + "}"


def _size(count: int) -> str:
    return f"{count >> 30}G" if count % (1 << 30) == 0 else f"{count >> 20}M"


def write(folder: Path) -> None:
    """Write the generated files."""
    for name, schema in (("manifest", manifest_schema()), ("policy", policy_schema())):
        (folder / f"{name}.schema.json").write_text(json.dumps(schema, indent=2) + "\n")
    (folder / "policy.sample.yaml").write_text(sample_policy())


if __name__ == "__main__":
    write(Path(sys.argv[1]))

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
from .model import MANIFEST, OUTPUTS_POLICY, POLICY, Policy
from .plan import Budgets, Outputs

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
    schema["properties"]["version"] = {"enum": [1, "1"], "description": "version of this format"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{_ID}/{name}-1.json",
        "title": title,
        **schema,
    }


def sample_policy() -> str:
    """The built-in policy, written out with every key commented. It parses to the same values."""
    policy = Policy()
    written = {
        "enforce": "true",
        "baseline": policy.baseline,
        "workload": policy.workload,
        "isolation": "{" + ", ".join(f"{k}: {v}" for k, v in policy.isolation.items()) + "}",
        "require": "[]",
        "denials": policy.denials,
        "approval": policy.approval,
        "forbidden_mounts": "[]",
        "forbidden_inputs_outside": "false",
        "scratch": _size(policy.scratch),
        "outputs": _section(policy.outputs),
        "budgets": _section(policy.budgets),
        "rules": f"[]\n{POLICY_RULES}",
    }
    out = [POLICY_HEAD]
    for name, key in POLICY.keys.items():
        if name != "version":
            out += [f"# {key.words}", f"{name}: {written[name]}".replace(": \n", ":\n"), ""]
    return "\n".join(out)


def _section(values: Budgets | Outputs) -> str:
    lines = []
    for name in OUTPUTS_POLICY if isinstance(values, Outputs) else values.__struct_fields__:
        value = getattr(values, name)
        if isinstance(value, tuple):
            shown = f"[{', '.join(value)}]"
        elif name in ("memory", "display") or name.endswith("_size"):
            shown = _size(value)
        elif name.endswith("_time"):
            shown = f"{value / 3600:g}h"
        else:
            shown = value if isinstance(value, str) else f"{value:g}"
        lines.append(f"\n  {name}: {shown}")
    return "".join(lines)


POLICY_HEAD = """\
# Policy: the ceiling for every manifest. These are the values that hold without a policy.
#
# Managed machines: /etc/jupyter-glovebox/policy.yaml, owned by root and writable by root alone.
# Your own: ~/.config/jupyter-glovebox/policy.yaml (not looked at where the managed one exists).
version: 1
"""
POLICY_RULES = """\
# rules:
#   - match: {path: /srv/class/**, group: [students]}
#     baseline: refuse
#     budgets: {memory: 1G, wall_time: 1h}"""


def _size(count: int) -> str:
    return f"{count >> 30}G" if count % (1 << 30) == 0 else f"{count >> 20}M"


def write(folder: Path) -> None:
    """Write the generated files."""
    for name, schema in (("manifest", manifest_schema()), ("policy", policy_schema())):
        (folder / f"{name}.schema.json").write_text(json.dumps(schema, indent=2) + "\n")
    (folder / "policy.sample.yaml").write_text(sample_policy())


if __name__ == "__main__":
    write(Path(sys.argv[1]))

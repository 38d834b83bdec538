"""conda environments: which one `conda run` names, and the variables that activation would set.

Scripts of `etc/conda/activate.d` are never run: they are code of the environment, and would run outside
the sandbox. What the common ones set is derived from the files they look for.

Sources: conda's documentation ("Managing environments", "conda run"), the activation scripts of the
conda-forge packages proj, gdal, libxml2, udunits2, openjdk, openssl, esmf, glib.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

from ..ledger.events import escape
from .base import SandboxError
from .variables import looks_secret, may_be_set

# variable: (path below the prefix, package whose activation script sets it)
_DERIVED = {
    "PROJ_DATA": ("share/proj", "proj"),
    "PROJ_LIB": ("share/proj", "proj4"),
    "GDAL_DATA": ("share/gdal", "gdal"),
    "GDAL_DRIVER_PATH": ("lib/gdalplugins", "gdal"),
    "GEOTIFF_CSV": ("share/epsg_csv", "geotiff"),
    "XML_CATALOG_FILES": ("etc/xml/catalog", "libxml2"),
    "UDUNITS2_XML_PATH": ("share/udunits/udunits2.xml", "udunits2"),
    "JAVA_HOME": ("lib/jvm", "openjdk"),
    "SSL_CERT_FILE": ("ssl/cacert.pem", "ca-certificates"),
    "ESMFMKFILE": ("lib/esmf.mk", "esmf"),
    "GSETTINGS_SCHEMA_DIR": ("share/glib-2.0/schemas", "glib"),
    "R_HOME": ("lib/R", "r-base"),
}
_KNOWN_SCRIPTS = tuple(package for _, package in _DERIVED.values())


def activation(prefix: str) -> tuple[dict[str, str], list[str]]:
    """The variables of an activated environment, and notes on what could not be derived.

    Args:
        prefix: absolute name of the environment.
    """
    base = os.path.isdir(f"{prefix}/condabin")
    named = os.path.basename(os.path.dirname(prefix)) == "envs"
    name = "base" if base else os.path.basename(prefix) if named else prefix
    variables = {
        "CONDA_PREFIX": prefix,
        "CONDA_DEFAULT_ENV": name,
        "CONDA_PROMPT_MODIFIER": f"({name}) ",
        "CONDA_SHLVL": "1",
    }
    for variable, (path, _) in _DERIVED.items():
        full = f"{prefix}/{path}"
        if os.path.exists(full):
            variables[variable] = (
                f"file://{full} file:///etc/xml/catalog" if path.endswith("catalog") else full
            )
    notes = []
    scripts = [os.path.basename(path) for path in sorted(glob.glob(f"{prefix}/etc/conda/activate.d/*.sh"))]
    strange = [script for script in scripts if not any(known in script for known in _KNOWN_SCRIPTS)]
    if strange:
        shown = ", ".join(escape(script) for script in strange)
        notes.append(f"Not run: activation scripts of {escape(prefix)}: {shown}")
    for key, value in _state(prefix).items():
        if not may_be_set(key) or looks_secret(key):
            notes.append(f"Not set: {escape(key)} of {escape(prefix)}/conda-meta/state")
        else:
            variables[key] = value
    return variables, notes


def _state(prefix: str) -> dict[str, str]:
    """The variables of `conda env config vars`."""
    try:
        with open(f"{prefix}/conda-meta/state") as file:
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError):
        return {}
    import json

    try:
        found = json.loads(text)["env_vars"]
    except (ValueError, KeyError, TypeError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str) and v != "***unset***"}


def run_target(tool: str, arguments: list[str], env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The environment and the command of `conda run ARGUMENTS`.

    Args:
        tool: absolute name of conda, mamba or micromamba.
        arguments: what follows `run`.
        env: its variables.

    Raises:
        SandboxError: `validation`, when the environment cannot be found.
    """
    with_value = ("--cwd", "--log-level", "-r", "--root-prefix", "--name", "-n", "--prefix", "-p")
    rest = list(arguments)
    prefix = name = ""
    while rest and rest[0].startswith("-"):
        option, joined, value = rest.pop(0).partition("=")
        if option in with_value and not joined and rest:
            value = rest.pop(0)
        if option in ("-n", "--name"):
            name = value
        elif option in ("-p", "--prefix"):
            prefix = os.path.abspath(value)
    # conda refuses a `/` in a name; it would leave the folders of environments.
    for root in _roots(tool, env) if name and not prefix and "/" not in name else ():
        candidate = root if name in ("base", "root") else f"{root}/envs/{name}"
        if os.path.isdir(f"{candidate}/conda-meta"):
            prefix = candidate
            break
    prefix = prefix or (env.get("CONDA_PREFIX", "") if not name else "")
    if not prefix or not os.path.isdir(f"{prefix}/conda-meta"):
        raise SandboxError(
            "validation",
            f"The conda environment {escape(name or prefix) or '(unnamed)'} was not found.",
            "Name it by --prefix, or let the kernelspec start the environment's own python.",
        )
    return prefix, rest


def _roots(tool: str, env: Mapping[str, str]) -> list[str]:
    """Installations whose `envs` may hold a named environment."""
    home = env.get("HOME") or os.path.expanduser("~")
    real = os.path.dirname(os.path.dirname(os.path.realpath(tool)))
    roots = [os.path.dirname(os.path.dirname(tool)), real, env.get("MAMBA_ROOT_PREFIX", "")]
    roots += [f"{home}/.conda", f"{home}/micromamba", f"{home}/.local/share/mamba"]
    roots += [path.removesuffix("/envs") for path in env.get("CONDA_ENVS_PATH", "").split(":")]
    return [root for root in dict.fromkeys(roots) if root.startswith("/")]

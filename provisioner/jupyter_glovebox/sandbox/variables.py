"""The variables of the kernel: an allow-list, so that no secret of the host's environment gets in.

Sources: environ(7), locale(7), tzset(3), git(1), Python's command line documentation, pip's user guide
(configuration), the documentation of OpenMP, OpenBLAS, MKL, numexpr, numba, polars and loky.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping

from ..manifest.plan import Plan
from .base import Environment
from .etc import in_system, system_path

# Taken over from the host when the value is harmless text.
_PASSED = (
    "LANG", "LANGUAGE", "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION",
    "LC_MEASUREMENT", "LC_MESSAGES", "LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE",
    "LC_TIME", "TZ", "TERM", "COLORTERM", "NO_COLOR", "COLUMNS", "LINES", "MPLBACKEND", "PYTHONHASHSEED",
    "PYTHONUTF8", "PYTHONIOENCODING",
)  # fmt: skip
_HARMLESS = re.compile(r"[\w .:,/@+=-]{0,256}", re.ASCII)
_THREADS = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",
)  # fmt: skip
# Lists of folders or a file: taken over only as far as they are visible inside.
_LISTS = frozenset(
    ("LD_LIBRARY_PATH", "PYTHONPATH", "R_LIBS", "R_LIBS_SITE", "JULIA_DEPOT_PATH", "CLASSPATH")
)
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_DENIED = re.compile(
    r"LD_.*|GLIBC_TUNABLES|PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|PWD|OLDPWD|JPY_.*|JUPYTER.*|"
    r"PYTHON(HOME|STARTUP|USERBASE|INSPECT|EXECUTABLE|PLATLIBDIR)|BASH_ENV|ENV|IFS|BASH_FUNC_.*|XDG_RUNTIME_DIR|"
    r"SSH_.*|DBUS_.*|GPG_.*|DISPLAY|WAYLAND_.*|XAUTHORITY|.*_PROXY|GIT_(SSH|ASKPASS|CONFIG).*|SUDO_.*|"
    r"AWS_.*|AZURE_.*|GOOGLE_.*|GCLOUD_.*|CLOUDSDK_.*|KUBE.*|DOCKER_.*|VAULT_.*|"
    r"NOTIFY_SOCKET|LISTEN_FDS|CREDENTIALS_DIRECTORY",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH(?!OR)|COOKIE|SESSION_?(ID|KEY)|"
    r"(^|_)(KEY|PW|PWD|PASS|DSN|SAS|JWT|PAT)(_|$)|DATABASE_URL|CONNECTION_?STRING",
    re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHORTEST_SECRET = 6


def packages_dir(home: str) -> str:
    """Where `%pip install` puts packages inside; it is on sys.path and goes with the sandbox."""
    return f"{home}/.local/share/glovebox/packages"


def may_be_set(name: str) -> bool:
    """Whether an environment or a kernelspec may set this variable in the kernel."""
    return bool(_NAME.fullmatch(name)) and not _DENIED.fullmatch(name)


def looks_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return bool(_SECRET.search(name))


def kernel_environment(
    plan: Plan,
    environment: Environment,
    *,
    host_env: Mapping[str, str],
    spec_env: Mapping[str, str],
    user: str | None = None,
    home: str | None = None,
) -> dict[str, str]:
    """The complete variables of a kernel or command.

    Args:
        plan: gives the number of processors, and variables of the manifest (which win).
        environment: gives PATH and the variables of venv or conda.
        host_env: the variables of the server or caller; only harmless ones are taken over.
        spec_env: the kernelspec's own `env`; see `withheld` for what is not taken.
        user, home: None means the account's own.
    """
    home = home or host_env.get("HOME") or os.path.expanduser("~")
    user = user or _user_name()
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    env = {name: host_env[name] for name in _PASSED if _HARMLESS.fullmatch(host_env.get(name, "\0"))}
    if not any(name in env for name in ("LANG", "LC_ALL", "LC_CTYPE")):
        env["LANG"] = "C.UTF-8"
    env.setdefault("TERM", "xterm-256color")
    env |= {
        "PATH": ":".join(environment.path or system_path()),
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": shell,
        "TMPDIR": "/tmp",  # noqa: S108
        "XDG_CACHE_HOME": f"{home}/.cache",
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "MPLCONFIGDIR": f"{home}/.config/matplotlib",
        "IPYTHONDIR": f"{home}/.ipython",
        # ipykernel ends itself when its parent is pid 1 unless it was told to expect that.
        "JPY_PARENT_PID": "1",
        # The environment is read-only; attempts to cache there would only be denied.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": packages_dir(home),
    }
    env |= _tools(plan, home) | _threads(plan.budgets.cpus, host_env)
    if session := host_env.get("JPY_SESSION_NAME"):
        env["JPY_SESSION_NAME"] = session
    seen = _visible(plan, environment)
    for name in _CERTIFICATES:
        value = host_env.get(name, "")
        if _is_visible(value, seen) and os.path.exists(value):
            env[name] = value
    env |= environment.variables
    env |= _from_spec(spec_env, host_env, seen, env)
    return env | plan.environment


def withheld(spec_env: Mapping[str, str], host_env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a kernelspec that the kernel does not get, name to the reason for a person."""
    secrets = [
        value for name, value in host_env.items() if looks_secret(name) and len(value) >= _SHORTEST_SECRET
    ]
    reasons = {}
    for name, value in spec_env.items():
        if looks_secret(name):
            reasons[name] = "its name says that it is a secret"
        elif name not in _LISTS and not may_be_set(name):
            reasons[name] = "the sandbox sets it, or it reaches out of the sandbox"
        elif "\0" in value or any(secret in value for secret in secrets):
            reasons[name] = "it repeats a secret of the server's environment"
    return reasons


def _from_spec(
    spec_env: Mapping[str, str], host_env: Mapping[str, str], seen: tuple[str, ...], env: Mapping[str, str]
) -> dict[str, str]:
    denied = withheld(spec_env, host_env)
    out = {}
    for name, value in spec_env.items():
        if name in denied:
            continue
        if name in _LISTS:
            entries = [entry for entry in value.split(":") if _is_visible(entry, seen)]
            if name == "PYTHONPATH":
                entries.insert(0, env["PYTHONPATH"])
            if entries:
                out[name] = ":".join(entries)
        else:
            out[name] = value
    return out


def _tools(plan: Plan, home: str) -> dict[str, str]:
    """Settings that keep git and pip working, or failing in clear words."""
    tools = {
        # Read-only repositories must not be locked, and may belong to an owner unknown inside.
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "PIP_TARGET": packages_dir(home),
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_NO_WARN_SCRIPT_LOCATION": "1",
    }
    if not plan.network:
        # pip prints the address that it cannot reach: let it say why.
        tools["PIP_INDEX_URL"] = "https://no-network-in-the-manifest-of-this-notebook.invalid/simple"
        tools["PIP_RETRIES"] = "0"
        tools["UV_OFFLINE"] = "1"
    return tools


def _threads(cpus: float, host_env: Mapping[str, str]) -> dict[str, str]:
    """Thread pools sized to the processors granted; a smaller number of the host's stays."""
    granted = max(1, math.ceil(cpus))
    out = {}
    for name in _THREADS:
        wanted = host_env.get(name, "")
        own = int(wanted) if re.fullmatch(r"[0-9]{1,6}", wanted) else 0
        out[name] = str(min(own, granted) if own > 0 else granted)
    return out


def _visible(plan: Plan, environment: Environment) -> tuple[str, ...]:
    names: Iterable[str] = (
        *(bind.target for bind in environment.binds),
        *(name for _, name in environment.links),
        *(name for grant in plan.inputs for name in (grant.path, grant.source)),
        plan.workdir,
        "/etc/ssl/certs",
        "/etc/pki/tls/certs",
        "/etc/pki/ca-trust/extracted",
    )
    return tuple(names)


def _is_visible(path: str, seen: tuple[str, ...]) -> bool:
    """Whether an absolute path is a name inside."""
    if not path.startswith("/") or os.path.normpath(path) != path.rstrip("/"):
        return False
    return in_system(path) or any(path == name or path.startswith(name + "/") for name in seen)


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user{os.getuid()}"

"""A transient systemd scope with this process in it: a delegated cgroup v2 subtree, made on request.

The request goes by `busctl call … StartTransientUnit` rather than `systemd-run --scope`, for it must name
a running process (PIDs=). The supervisor itself enters the scope, not only the kernel: moving a process
between groups needs the right to write their common ancestor, and a login session's scope lies outside
the subtree of the user's manager. systemd removes the scope when its last process has gone. Sources:
org.freedesktop.systemd1(5), systemd.scope(5), systemd.resource-control(5), busctl(1).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from .host import Host, Unavailable, below
from .v2 import NO_CONTROLLERS, available_controllers, service_fix

_PATIENCE = 3.0
_PATH = "/usr/bin:/bin:/usr/local/bin:/run/current-system/sw/bin"


def own_scope(host: Host, name: str) -> Path:
    """Move this process into a new delegated scope `glovebox-<name>.scope`; gives the scope's group.

    Raises:
        Unavailable: systemd, the user's manager or busctl is missing, or the request was refused.
    """
    mount = host.v2_mount()
    if mount is None or not available_controllers(mount) & {"memory", "pids"}:
        raise Unavailable(NO_CONTROLLERS)
    if not host.systemd:
        raise Unavailable("systemd does not run this machine")
    environment = _bus_environment(host)
    program = shutil.which("busctl", path=_PATH)
    if program is None:
        raise Unavailable("busctl is not installed", "Install the package that has busctl (systemd).")
    unit = f"glovebox-{name}.scope"
    _request(program, unit, environment, host)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        path = host.own_groups().get("", "")
        if path.rpartition("/")[2] == unit and (group := below(mount, path)):
            return group
        time.sleep(0.002)
    raise Unavailable(f"systemd took {unit} but did not move us into it", service_fix(host))


def _bus_environment(host: Host) -> dict[str, str]:
    environment = {"PATH": _PATH}
    if host.uid == 0:
        return environment
    runtime = host.run / "user" / str(host.uid)
    if not (runtime / "bus").exists() and not (runtime / "systemd/private").exists():
        raise Unavailable("no systemd user manager runs for this user", service_fix(host))
    return environment | {
        "XDG_RUNTIME_DIR": str(runtime),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
    }


def _request(program: str, unit: str, environment: dict[str, str], host: Host) -> None:
    properties = (
        ("Description", "s", "Jupyter Glovebox kernel"),
        ("PIDs", "au", "1", str(os.getpid())),
        ("Delegate", "b", "true"),
        ("CollectMode", "s", "inactive-or-failed"),
    )
    arguments = [
        program, "--system" if host.uid == 0 else "--user", "--quiet", "--timeout=5", "call",
        "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
        "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", str(len(properties)),
        *(word for entry in properties for word in entry), "0",
    ]  # fmt: skip
    try:
        answer = subprocess.run(
            arguments, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"systemd did not answer: {error}", service_fix(host)) from error
    if answer.returncode:
        said = answer.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Unavailable(f"systemd refused a scope: {said[-1] if said else 'no reason'}", service_fix(host))

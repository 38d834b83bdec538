"""Helpers: a plain bubblewrap around a discovered environment, and installations shaped like real ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from jupyter_glovebox.manifest.plan import Budgets, InputGrant, Plan, Scratch
from jupyter_glovebox.sandbox import etc
from jupyter_glovebox.sandbox.base import Environment
from jupyter_glovebox.sandbox.variables import kernel_environment

SYSTEM_PYTHON = os.path.realpath("/usr/bin/python3")
VERSION = re.search(r"\d+\.\d+", os.path.basename(SYSTEM_PYTHON))[0]  # type: ignore[index]
# Enough of the standard library to start, to run site and to import what the tests import.
_PACKAGES = ("encodings", "collections", "importlib", "re", "json", "lib-dynload", "ctypes")


def make_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "name": "test",
        "baseline": True,
        "notebook": None,
        "workdir": "/srv/glovebox-test",
        "isolation": "bubblewrap",
        "workload": "generated-code",
        "scratch": Scratch(size=1 << 20),
        "outputs": None,
        "budgets": Budgets(
            memory=1 << 30, cpus=1.5, cpu_time=60, wall_time=60, processes=64, open_files=256, display=1 << 20
        ),
        "policy": "sha256:test",
    }
    return Plan(**(values | changes))


def grant(path: Path | str, source: Path | str | None = None) -> InputGrant:
    source = os.path.realpath(path) if source is None else str(source)
    return InputGrant(path=str(path), source=source, kind="directory" if os.path.isdir(source) else "file")


def run(
    environment: Environment,
    argv: list[str],
    *,
    home: str,
    workdir: str,
    user: str = "tester",
    plan: Plan | None = None,
    host_env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of the host but the system, /etc as made, and the environment."""
    plan = plan or make_plan(workdir=workdir)
    env = kernel_environment(plan, environment, host_env=host_env or {}, spec_env={}, user=user, home=home)
    uid, gid = os.getuid() or 1000, os.getgid() or 1000
    command = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--uid",
        str(uid),
        "--gid",
        str(gid),
    ]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--clearenv", "--hostname", "inside"]
    mounts: list[tuple[str, list[str]]] = [(home, ["--tmpfs", home]), (workdir, ["--tmpfs", workdir])]
    binds, links = etc.system_binds()
    for bind in (*binds, *environment.binds, *etc.etc_binds()):
        mounts.append((bind.target, ["--ro-bind", bind.source, bind.target]))
    for text, name in (*links, *environment.links):
        mounts.append((name, ["--symlink", text, name]))
    command += ["--tmpfs", "/tmp"]
    for _, arguments in sorted(mounts, key=lambda mount: mount[0].split("/")):
        command += arguments
    command += ["--proc", "/proc", "--dev", "/dev"]
    contents = []
    for name, content in etc.etc_files(user, uid, gid, home, "inside").items():
        fd = os.memfd_create("etc")
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        contents.append(fd)
        command += ["--file", str(fd), name]
    for name, value in env.items():
        command += ["--setenv", name, value]
    try:
        return subprocess.run(
            [*command, "--chdir", workdir, "--", *argv],
            capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"}, pass_fds=contents,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    finally:
        for fd in contents:
            os.close(fd)


def make_python(prefix: Path) -> Path:
    """A small Python that runs on its own: the system's interpreter and part of its library."""
    library = prefix / f"lib/python{VERSION}"
    (prefix / "bin").mkdir(parents=True)
    library.mkdir(parents=True)
    origin = Path(f"/usr/lib/python{VERSION}")
    for file in origin.glob("*.py"):
        shutil.copy(os.path.realpath(file), library / file.name)
    for name in _PACKAGES:
        shutil.copytree(origin / name, library / name, ignore=shutil.ignore_patterns("__pycache__"))
    (library / "site-packages").mkdir()
    python = prefix / f"bin/python{VERSION}"
    shutil.copy(SYSTEM_PYTHON, python)
    (prefix / "bin/python3").symlink_to(python.name)
    (prefix / "bin/python").symlink_to("python3")
    return python


def make_venv(folder: Path, base: Path | str = SYSTEM_PYTHON, *, module: str = "inmate") -> Path:
    """A venv as PEP 405 and the tools write it, with one module in it; its python."""
    site = folder / f"lib/python{VERSION}/site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "lib64").symlink_to("lib")
    (folder / "bin/python").symlink_to(base)
    (folder / "bin/python3").symlink_to("python")
    (folder / "pyvenv.cfg").write_text(
        f"home = {Path(base).parent}\ninclude-system-site-packages = false\nversion = {VERSION}.0\n"
    )
    (site / f"{module}.py").write_text("answer = 42\n")
    return folder / "bin/python"


def make_conda(prefix: Path) -> Path:
    """A conda environment: a prefix with its own Python and conda-meta."""
    python = make_python(prefix)
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta/history").write_text("")
    (prefix / "share/proj").mkdir(parents=True)
    return python

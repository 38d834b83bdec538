"""Runs the test suites of other Jupyter projects with `glovebox` as the default provisioner.

    python tests/kernel/peers.py [--folder DIR] [--plain] [SUITE …]

Downloads each project's source archive, makes one virtual environment with this project in it, and runs
the suites with JUPYTER_DEFAULT_PROVISIONER_NAME=glovebox (with --plain: without, as the control).
Failures that follow from the sandbox's purpose are listed in `EXPECTED` with the reason; every other
failure makes the exit code 1. Prints one line per suite: counts, expected failures, survivors.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Suite:
    """One peer: pinned source archive, what to install beside it, pytest arguments."""

    package: str
    version: str
    arguments: list[str]
    install: list[str] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)


OTHER_CLASS = "asserts the class of the local provisioner, or hides all provisioners but its own"
NO_CURVE = "asks for CurveZMQ; the sockets are private to the user instead, and `required` is refused"
ENVIRONMENT = "the kernel needs a variable of the test, and only named ones come in"
FORCED_IPC = "asserts TCP endpoints; a sandboxed kernel is reached by private Unix sockets only"
OWN_FILES = "the kernel needs files of the test's own folder, which no manifest grants it"

CLIENT_EXPECTED = {
    r"test_find_all_specs|test_existing\[no_provisioner\]": OTHER_CLASS,
    r"generates_curve_keys": NO_CURVE,
    r"test_signal_kernel_subprocesses|test_async_signal_kernel_subprocesses|test_start_new_(async_)?kernel|"
    r"test_templated_kspec_env|TestParallel|test_restarter": OWN_FILES,
    r"test_(tcp|ipc)_cinfo": FORCED_IPC,
}
SUITES = {
    "jupyter_kernel_test": Suite("jupyter_kernel_test", "0.7.0", ["test_ipykernel.py"]),
    "jupyter_client-quick": Suite(
        "jupyter_client",
        "8.10.0",
        [
            "-p", "no:asyncio", "tests/test_provisioning.py", "tests/test_kernelmanager.py",
            "tests/test_multikernelmanager.py", "tests/test_restarter.py", "tests/test_client.py",
        ],
        ["jupyter_client[test]"],
        CLIENT_EXPECTED,
    ),
    "jupyter_client": Suite(
        "jupyter_client", "8.10.0", ["-p", "no:asyncio", "tests"], ["jupyter_client[test]"], CLIENT_EXPECTED
    ),
    "nbclient": Suite(
        "nbclient",
        "0.11.0",
        ["-o", "asyncio_default_fixture_loop_scope=function", "tests"],
        ["nbclient[test]"],
        {r"Inline Image": OWN_FILES, r"test_(async_)?parallel_notebooks": ENVIRONMENT,
         r"Skip Exceptions with Cell Tags": ENVIRONMENT},
    ),
    "nbconvert": Suite(
        "nbconvert",
        "7.17.2",
        ["-p", "no:asyncio", "tests/preprocessors/test_execute.py", "tests/test_nbconvertapp.py", "-k", "execute"],
        ["nbconvert", "flaky"],
    ),
    "papermill": Suite(
        "papermill",
        "2.7.0",
        [
            "-p", "no:asyncio", "papermill/tests/test_execute.py", "papermill/tests/test_engines.py",
            "papermill/tests/test_clientwrap.py", "papermill/tests/test_autosave.py", "papermill/tests/test_cli.py",
        ],
        ["papermill[all]", "pytest-mock", "boto3", "moto", "azure-storage-blob", "azure-datalake-store",
         "azure-identity", "azure-storage-file-datalake"],
    ),
}  # fmt: skip


def _environment(folder: Path) -> Path:
    python = folder / "venv/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(ROOT), "ipykernel", "pytest",
             "pytest-timeout", "ipywidgets", "hatchling", "hatch-nodejs-version", "hatch-jupyter-builder"],
            check=True,
        )  # fmt: skip
    return python


def _source(suite: Suite, python: Path, folder: Path) -> Path:
    name = f"{suite.package}-{suite.version}"
    if not (folder / name).is_dir():
        if suite.install:
            subprocess.run(
                [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *suite.install],
                check=True,
            )
        subprocess.run(
            [python, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:",
             "--no-build-isolation", "-d", str(folder), f"{suite.package}=={suite.version}"],
            check=True,
        )  # fmt: skip
        (archive,) = folder.glob(f"{suite.package}-{suite.version}.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return folder / name


def _survivors() -> int:
    time.sleep(3)
    found = subprocess.run(
        ["pgrep", "-c", "-f", "jupyter_glovebox.supervisor.main"], capture_output=True, text=True
    )
    return int(found.stdout or 0)


def run(name: str, folder: Path, *, plain: bool, quiet: bool) -> bool:
    """Run one suite; whether every failure was an expected one."""
    suite = SUITES[name]
    python = _environment(folder)
    source = _source(suite, python, folder)
    env = dict(os.environ) | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    if not plain:
        env["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "glovebox"
    before = _survivors()
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-rfE", "--timeout=60", "-o", "timeout_method=signal", *suite.arguments],
        cwd=source, env=env, capture_output=True, text=True,
    )  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    expected = {} if plain else {f: r for f in failed for p, r in suite.expected.items() if re.search(p, f)}
    surprising = [f for f in failed if f not in expected]
    lines = done.stdout.strip().splitlines()
    survivors = _survivors() - before
    print(f"{name}: {lines[-1] if lines else done.stderr[-300:]}")
    print(f"    expected failures {len(expected)}, others {len(surprising)}, sandboxes left {survivors}")
    for test, reason in expected.items():
        print(f"    expected: {test}: {reason}")
    for test in surprising:
        print(f"    FAILED: {test}")
    if surprising and not quiet:
        print(done.stdout[-20000:])
    return not surprising and survivors == 0 and done.returncode in (0, 1)


def main() -> int:
    """Run the suites named on the command line, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--folder", type=Path, help="where archives and the environment are kept")
    parser.add_argument("--plain", action="store_true", help="with the local provisioner, as the control")
    parser.add_argument("--quiet", action="store_true", help="no test output, only the names of failures")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="peers-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = [run(n, folder, plain=args.plain, quiet=args.quiet) for n in args.suites or SUITES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The kernel's variables: what is needed, and no secret of the host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jupyter_glovebox.manifest.plan import Budgets, NetworkRule
from jupyter_glovebox.sandbox.base import Bind, Environment
from jupyter_glovebox.sandbox.environment import discover, kernel_environment
from jupyter_glovebox.sandbox.variables import packages_dir, withheld

from . import hostbox
from .hostbox import make_plan, make_venv

CANARY = "canary-b7f3a1"
SECRET_NAMES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "OPENAI_API_KEY", "DATABASE_URL", "PGPASSWORD",
    "JUPYTERHUB_API_TOKEN", "JUPYTER_TOKEN", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR",
    "HTTPS_PROXY", "https_proxy", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "BASH_ENV",
    "KUBECONFIG", "DOCKER_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "HISTFILE", "DISPLAY", "MY_COMPANY_THING",
    "GIT_ASKPASS", "BASH_FUNC_x%%", "PS1", "MAIL",
)  # fmt: skip
BUDGETS = Budgets(
    memory=1 << 30, cpus=2.5, cpu_time=60, wall_time=60, processes=64, open_files=256, display=1 << 20
)


def variables(
    host: dict[str, str] | None = None, spec: dict[str, str] | None = None, **changes: object
) -> dict[str, str]:
    environment = Environment(
        binds=(Bind(source="/opt/env", target="/opt/env"),), path=("/opt/env/bin", "/usr/bin")
    )
    return kernel_environment(
        make_plan(**changes),
        environment,
        host_env=host or {},
        spec_env=spec or {},
        user="ada",
        home="/home/ada",
    )


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_nothing_secret_of_the_host_gets_in(name: str) -> None:
    env = variables({name: CANARY, "LANG": "de_CH.UTF-8"})
    assert env["LANG"] == "de_CH.UTF-8", "the control: the host's variables are looked at"
    assert not any(CANARY in value for value in env.values())


@pytest.mark.parametrize("name", ["LANG", "TZ", "TERM", "MPLBACKEND"])
@pytest.mark.parametrize("value", ["a\nb", "$(id)", "x" * 300, "\x1b[2J"])
def test_a_passed_variable_cannot_smuggle(name: str, value: str) -> None:
    assert variables({name: value}).get(name) != value


def test_what_every_kernel_gets() -> None:
    env = variables()
    assert env["PATH"] == "/opt/env/bin:/usr/bin"
    assert (env["HOME"], env["USER"], env["LOGNAME"], env["TMPDIR"]) == ("/home/ada", "ada", "ada", "/tmp")
    assert env["JPY_PARENT_PID"] == "1"
    assert env["LANG"] == "C.UTF-8"
    assert all(
        env[name].startswith("/home/ada/") for name in ("IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME")
    )
    assert "XDG_RUNTIME_DIR" not in env


def test_thread_pools_follow_the_processors() -> None:
    env = variables(
        {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "all"}, budgets=BUDGETS
    )
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["MKL_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == env["NUMEXPR_MAX_THREADS"] == "3"


def test_the_manifest_wins_over_all() -> None:
    env = variables(
        {"TZ": "UTC"}, {"TZ": "Asia/Tokyo"}, environment={"TZ": "Europe/Zurich", "OMP_NUM_THREADS": "1"}
    )
    assert (env["TZ"], env["OMP_NUM_THREADS"]) == ("Europe/Zurich", "1")


def test_the_kernelspec_may_set_what_is_harmless() -> None:
    spec = {"TOKENIZERS_PARALLELISM": "false", "PAGER": "cat", "FORCE_COLOR": "1", "GIT_PAGER": "cat", "MODE": "x",
            "GIT_AUTHOR_NAME": "Ada"}  # fmt: skip
    env = variables(spec=spec)
    assert spec.items() <= env.items()
    assert withheld(spec, {}) == {}


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_AUDIT", "GLIBC_TUNABLES", "PATH", "HOME", "JPY_PARENT_PID", "PYTHONHOME", "PYTHONSTARTUP",
     "BASH_ENV", "https_proxy", "SSH_AUTH_SOCK", "AWS_PROFILE", "DB_PASSWORD", "HF_TOKEN", "x y", "", "JUPYTER_TOKEN"],
)  # fmt: skip
def test_the_kernelspec_may_not_set_the_rest(name: str) -> None:
    env = variables(spec={name: CANARY})
    assert CANARY not in env.values()
    assert name in withheld({name: CANARY}, {})


def test_a_kernelspec_cannot_carry_a_host_secret_under_another_name() -> None:
    host = {"COMPANY_API_KEY": CANARY}
    assert variables(host, {"GREETING": "hello"})["GREETING"] == "hello"
    assert "GREETING" not in variables(host, {"GREETING": f"hello {CANARY}"})


def test_search_paths_keep_only_what_is_visible_inside() -> None:
    env = variables(
        spec={"PYTHONPATH": "/opt/env/extra:/home/ada/src:relative", "LD_LIBRARY_PATH": "/home/ada/lib"}
    )
    assert env["PYTHONPATH"] == f"{packages_dir('/home/ada')}:/opt/env/extra"
    assert "LD_LIBRARY_PATH" not in env


def test_certificates_are_kept_when_they_are_visible(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    env = variables({"SSL_CERT_FILE": str(bundle), "SSL_CERT_DIR": "/usr/share"})
    assert "SSL_CERT_FILE" not in env
    assert env["SSL_CERT_DIR"] == "/usr/share"


def test_pip_says_why_only_without_network() -> None:
    assert "no-network" in variables()["PIP_INDEX_URL"]
    assert "PIP_INDEX_URL" not in variables(network=(NetworkRule(host="pypi.org", paths=("/**",)),))


def test_a_package_installed_while_python_runs_can_be_imported(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    python = make_venv(home / "v")
    environment = discover([str(python)], {"HOME": str(home), "PATH": "/usr/bin"})
    code = (
        "import os, sys\n"
        "open(os.environ['PIP_TARGET'] + '/installed_later.py', 'w').write('value = 7')\n"
        "import installed_later\n"
        "print(installed_later.value)\n"
    )
    done = hostbox.run(environment, [str(python), "-c", code], home=str(home), workdir=str(tmp_path / "work"))
    assert (done.stdout.strip(), done.returncode) == ("7", 0), done.stderr


def test_the_host_environment_is_not_needed() -> None:
    home = os.path.expanduser("~")
    env = kernel_environment(make_plan(), Environment(binds=()), host_env={}, spec_env={})
    assert env["HOME"] == home
    assert env["PATH"].startswith("/usr/")

"""Every kind of environment is found, mounted as little as it takes, and runs in a real sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_glovebox.sandbox.base import Environment, SandboxError
from jupyter_glovebox.sandbox.environment import discover, stage_python
from jupyter_glovebox.sandbox.validation import validate

from . import hostbox
from .hostbox import SYSTEM_PYTHON, VERSION, make_conda, make_plan, make_python, make_venv

IMPORT = "import inmate, sys, os, json; print(json.dumps([inmate.answer, sys.prefix, sys.base_prefix]))"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / "ada"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    (folder / "diary.txt").write_text("private")
    return folder


def find(argv: list[str], home: Path, **env: str) -> Environment:
    environment = discover(argv, {"HOME": str(home), "PATH": "/usr/bin:/bin"} | env, cwd=str(home))
    validate(make_plan(), environment, private_dirs=())
    return environment


def inside(environment: Environment, argv: list[str], home: Path, workdir: Path | None = None) -> str:
    done = hostbox.run(environment, argv, home=str(home), workdir=str(workdir or home / "project"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def targets(environment: Environment) -> set[str]:
    return {bind.target for bind in environment.binds}


# -- venvs ------------------------------------------------------------------------------------------


def test_venv_over_the_system_python(home: Path) -> None:
    python = make_venv(home / "project/.venv")
    environment = find([str(python)], home)
    assert targets(environment) == {str(home / "project/.venv")}
    assert environment.variables == {"VIRTUAL_ENV": str(home / "project/.venv")}
    assert environment.path[0] == str(home / "project/.venv/bin")
    seen = json.loads(inside(environment, [str(python), "-c", IMPORT], home))
    assert seen == [42, str(home / "project/.venv"), "/usr"]


def test_a_real_venv_of_this_python(home: Path) -> None:
    folder = home / "envs/real"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    argv = [str(folder / "bin/python"), "-c", "import sys, ssl, ctypes, sqlite3; print(sys.prefix)"]
    environment = find(argv, home)
    assert str(folder) in targets(environment)
    assert inside(environment, argv, home).strip() == str(folder)


def test_a_venv_made_with_copies(home: Path) -> None:
    folder = home / "copied"
    subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", "--copies", str(folder)], check=True)
    argv = [str(folder / "bin/python"), "-c", "import sys; print(sys.prefix, sys.base_prefix)"]
    assert inside(find(argv, home), argv, home).split() == [str(folder), "/usr"]


def test_nothing_else_of_the_home_is_visible(home: Path) -> None:
    python = make_venv(home / "project/.venv")
    code = f"import os; print(os.path.exists({str(home / 'diary.txt')!r}), os.listdir({str(home)!r}))"
    seen = inside(find([str(python)], home), [str(python), "-c", code], home)
    assert (home / "diary.txt").exists()
    assert seen.startswith("False")
    assert "diary" not in seen


def test_a_venv_in_the_projects_own_folder_brings_no_data(home: Path) -> None:
    project = home / "project"
    python = make_venv(project)
    (project / "clients.csv").write_text("secret")
    (project / "data").mkdir()
    environment = find([str(python)], home)
    assert targets(environment) == {str(project / name) for name in ("bin", "lib", "pyvenv.cfg")}
    assert ("lib", str(project / "lib64")) in environment.links
    assert any("clients.csv" in note for note in environment.notes)
    code = f"{IMPORT}; print(sorted(os.listdir({str(project)!r})))"
    seen = inside(environment, [str(python), "-c", code], home, project)
    assert seen.startswith("[42")
    assert "clients.csv" not in seen
    assert "'data'" not in seen


def test_names_that_are_links_work_as_on_the_host(home: Path) -> None:
    real = home.parent.parent / "disk"
    make_venv(real / "stats")
    (home / "envs").symlink_to(real)
    python = home / "envs/stats/bin/python"
    environment = find([str(python)], home)
    assert targets(environment) == {str(real / "stats")}
    assert (str(real / "stats"), str(home / "envs/stats")) in environment.links
    seen = json.loads(inside(environment, [str(python), "-c", IMPORT], home))
    assert seen[:2] == [42, str(home / "envs/stats")]


def test_a_link_to_an_interpreter_in_a_private_bin(home: Path) -> None:
    python = make_python(home.parent.parent / "opt/py")
    (home / "bin").mkdir()
    (home / "bin/analysis").symlink_to(python)
    environment = find(["analysis"], home, PATH=f"{home}/bin:/usr/bin")
    assert targets(environment) == {str(home.parent.parent / "opt/py")}
    assert environment.path[0] == str(home / "bin")
    assert inside(environment, ["analysis", "-c", "import sys; print(sys.prefix)"], home).strip() == str(
        home.parent.parent / "opt/py"
    )


def test_a_venv_whose_python_is_gone_says_so(home: Path) -> None:
    python = make_venv(home / "old", home / "gone/bin/python3")
    (home / "old/bin/python").unlink()
    (home / "old/bin/python").symlink_to(SYSTEM_PYTHON)
    with pytest.raises(SandboxError, match="is gone") as refused:
        find([str(python)], home)
    assert "venv --clear" in refused.value.remedy


def test_a_home_of_two_hundred_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / ("h" * 200)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    python = make_venv(home / "env with space é")
    assert inside(find([str(python)], home), [str(python), "-c", IMPORT], home).startswith("[42")


# -- version managers -------------------------------------------------------------------------------


def test_uv_python_behind_a_folder_link(home: Path) -> None:
    store = home / ".local/share/uv/python"
    make_python(store / "cpython-3.99.4-linux-x86_64-gnu")
    (store / "cpython-3.99-linux-x86_64-gnu").symlink_to("cpython-3.99.4-linux-x86_64-gnu")
    python = make_venv(home / "p/.venv", store / f"cpython-3.99-linux-x86_64-gnu/bin/python{VERSION}")
    environment = find([str(python)], home)
    assert targets(environment) == {str(home / "p/.venv"), str(store / "cpython-3.99.4-linux-x86_64-gnu")}
    seen = json.loads(inside(environment, [str(python), "-c", IMPORT], home))
    assert seen[0] == 42
    assert os.path.realpath(seen[2]) == str(store / "cpython-3.99.4-linux-x86_64-gnu")


def _pyenv(home: Path) -> Path:
    root = home / ".pyenv"
    for version in ("3.99.1", "3.99.10", "3.98.0"):
        make_python(root / f"versions/{version}")
    (root / "shims").mkdir()
    shim = root / "shims/python3"
    shim.write_text('#!/usr/bin/env bash\nexec "$PYENV_ROOT/libexec/pyenv" exec "$(basename $0)" "$@"\n')
    shim.chmod(0o755)
    return root


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("PYENV_VERSION", "3.98.0"), ("local", "3.99.1"), ("global", "3.99.10")],
)
def test_pyenv_shim_is_never_used(home: Path, choice: str, expected: str) -> None:
    root = _pyenv(home)
    (root / "version").write_text("3.99\n")  # a prefix means the newest
    env = {"PATH": f"{root}/shims:/usr/bin:/bin"}
    if choice == "PYENV_VERSION":
        env["PYENV_VERSION"] = "3.98.0"
    elif choice == "local":
        (home / ".python-version").write_text("# ours\n3.99.1\n")
    environment = find(["python3"], home, **env)
    assert targets(environment) == {str(root / f"versions/{expected}")}
    assert str(root / "shims") not in environment.path
    for argv0 in ("python3", str(root / "shims/python3")):
        seen = inside(environment, [argv0, "-c", "import sys; print(sys.prefix)"], home)
        assert seen.strip() == str(root / f"versions/{expected}")


def test_another_managers_shim_is_refused_with_the_remedy(home: Path) -> None:
    shim = home / ".asdf/shims/python"
    shim.parent.mkdir(parents=True)
    shim.write_text("#!/bin/sh\nexec asdf exec python\n")
    shim.chmod(0o755)
    with pytest.raises(SandboxError, match="shim") as refused:
        find([str(shim)], home)
    assert "asdf which python" in refused.value.remedy


# -- conda ------------------------------------------------------------------------------------------


def test_conda_environment_is_activated(home: Path) -> None:
    base = home / "miniconda3"
    make_conda(base)
    python = make_conda(base / "envs/geo")
    (base / "envs/geo/conda-meta/state").write_text(
        json.dumps({"env_vars": {"MODEL": "small", "LD_PRELOAD": "x", "API_TOKEN": "canary-state"}})
    )
    environment = find([str(python)], home)
    prefix = str(base / "envs/geo")
    assert targets(environment) == {prefix}
    assert environment.variables == {
        "CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": "geo", "CONDA_PROMPT_MODIFIER": "(geo) ",
        "CONDA_SHLVL": "1", "PROJ_DATA": f"{prefix}/share/proj", "PROJ_LIB": f"{prefix}/share/proj",
        "MODEL": "small",
    }  # fmt: skip
    code = "import os, sys; print(sys.prefix, os.environ['CONDA_PREFIX'])"
    assert inside(environment, [str(python), "-c", code], home).split() == [prefix, prefix]


def test_conda_base_without_its_other_environments(home: Path) -> None:
    base = home / "miniconda3"
    python = make_conda(base)
    make_conda(base / "envs/other")
    (base / "pkgs").mkdir()
    (base / "condabin").mkdir()
    (base / ".condarc").write_text("channels: [https://token@host]")
    environment = find([str(python)], home)
    assert targets(environment) == {str(base / n) for n in ("bin", "conda-meta", "condabin", "lib", "share")}
    assert environment.variables["CONDA_DEFAULT_ENV"] == "base"
    seen = inside(environment, [str(python), "-c", f"import os; print(os.listdir({str(base)!r}))"], home)
    assert ".condarc" not in seen
    assert "envs" not in seen


def test_conda_run_names_its_environment(home: Path) -> None:
    base = home / "miniconda3"
    make_conda(base)
    make_conda(base / "envs/geo")
    tool = base / "bin/conda"
    tool.write_text(f"#!{base}/bin/python\n")
    tool.chmod(0o755)
    environment = find([str(tool), "run", "-n", "geo", "--no-capture-output", "python", "-c", "1"], home)
    assert {str(base / "envs/geo"), str(base / "bin")} <= targets(environment)
    assert str(base / "envs/geo/bin") in environment.path
    with pytest.raises(SandboxError, match="was not found"):
        find([str(tool), "run", "-n", "nope", "python"], home)
    with pytest.raises(SandboxError, match="was not found"):
        find([str(tool), "run", "-n", "../..", "python"], home)


# -- wrappers ---------------------------------------------------------------------------------------


def test_env_wrapper_searches_the_given_path(home: Path) -> None:
    make_venv(home / "v")
    environment = find(["/usr/bin/env", "-S", "X=1 python", "-c", "1"], home, PATH=f"{home}/v/bin:/usr/bin")
    assert str(home / "v") in targets(environment)
    argv = ["/usr/bin/env", "python", "-c", IMPORT]
    assert inside(environment, argv, home).startswith("[42")


def test_a_shell_script_that_activates(home: Path) -> None:
    make_venv(home / "v")
    (home / "v/bin/activate").write_text(f"PATH={home}/v/bin:$PATH\n")
    script = home / "kernels/mine/start.sh"
    script.parent.mkdir(parents=True)
    (script.parent / "kernel.json").write_text("{}")
    script.write_text('#!/bin/sh\n. "$HOME/v/bin/activate"\nexec python "$@"\n')
    script.chmod(0o755)
    environment = find([str(script), "-c", IMPORT], home)
    assert targets(environment) == {str(home / "v"), str(script)}
    assert inside(environment, [str(script), "-c", IMPORT], home).startswith("[42")


def test_the_kernelspecs_folder_is_mounted_and_no_other_argument(home: Path) -> None:
    folder = home / ".local/share/jupyter/kernels/mine"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text("{}")
    (folder / "launch.py").write_text("print('launched')")
    (home / "clients.csv").write_text("secret")
    argv = ["/usr/bin/python3", str(folder / "launch.py"), str(home / "clients.csv"), str(home)]
    environment = find(argv, home)
    assert targets(environment) == {str(folder)}
    assert inside(environment, argv, home).strip() == "launched"


def test_a_tool_in_a_shared_bin_folder_is_one_file(home: Path) -> None:
    tool = home / ".local/bin/tool"
    tool.parent.mkdir(parents=True)
    (home / ".local/share").mkdir()
    python = make_venv(home / ".local/pipx/venvs/tool")
    tool.write_text(f"#!{python}\nimport inmate\nprint(inmate.answer)\n")
    tool.chmod(0o755)
    environment = find([str(tool)], home)
    assert targets(environment) == {str(tool), str(home / ".local/pipx/venvs/tool")}
    assert inside(environment, [str(tool)], home).strip() == "42"


def test_a_programs_settings_and_data_stay_out(home: Path) -> None:
    prefix = home.parent.parent / "srv/app"
    for name in ("bin", "lib", "etc", "data"):
        (prefix / name).mkdir(parents=True)
    (prefix / "bin/app").write_text("#!/bin/sh\n")
    (prefix / "bin/app").chmod(0o755)
    environment = find([str(prefix / "bin/app")], home)
    assert targets(environment) == {str(prefix / "bin"), str(prefix / "lib")}
    assert any(note.endswith("data, etc") for note in environment.notes)


def test_a_python_installed_in_dot_local_is_mounted_in_parts(home: Path) -> None:
    python = make_python(home / ".local")
    (home / ".local/share").mkdir()
    (home / ".local/share/letters.txt").write_text("private")
    environment = find([str(python)], home)
    assert targets(environment) == {str(python), str(home / f".local/lib/python{VERSION}")}
    assert inside(environment, [str(python), "-c", "import sys; print(sys.prefix)"], home).strip() == str(
        home / ".local"
    )


# -- refusals ---------------------------------------------------------------------------------------


def test_missing_and_unusable_commands_fail_like_popen(home: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'nope'"):
        find(["nope"], home)
    with pytest.raises(FileNotFoundError):
        find(["/nope/python"], home)
    plain = home / "plain"
    plain.write_text("x")
    plain.chmod(0o644)
    with pytest.raises(PermissionError, match="Permission denied"):
        find([str(plain)], home)
    with pytest.raises(PermissionError):
        find([str(home)], home)
    plain.write_text("#!/nope/interpreter\n")
    plain.chmod(0o755)
    with pytest.raises(FileNotFoundError, match="interpreter"):
        find([str(plain)], home)


def test_relative_commands_are_relative_to_the_given_folder(home: Path) -> None:
    make_venv(home / "v")
    assert str(home / "v") in targets(find(["v/bin/python"], home))


def test_a_home_is_never_an_environment(home: Path) -> None:
    python = make_venv(home)
    with pytest.raises(SandboxError, match="is a home folder") as refused:
        find([str(python)], home)
    assert refused.value.stage == "validation"
    assert refused.value.remedy


def test_a_prefix_that_holds_a_home_is_refused(tmp_path: Path, home: Path) -> None:
    python = make_venv(tmp_path / "home")
    with pytest.raises(SandboxError, match="holds the home"):
        find([str(python)], home)


def test_a_prefix_among_credentials_is_refused(home: Path) -> None:
    python = make_venv(home / ".aws/env")
    with pytest.raises(SandboxError, match="cloud credentials"):
        find([str(python)], home)
    tool = home / ".ssh/tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    with pytest.raises(SandboxError, match="private keys"):
        find([str(tool)], home)


def test_a_prefix_with_our_state_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_venv(home / "v")
    (home / "v/share/state").mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_GLOVEBOX_STATE_DIR", str(home / "v/share/state"))
    with pytest.raises(SandboxError, match="own state"):
        find([str(python)], home)


# -- what lies elsewhere ----------------------------------------------------------------------------


def test_packages_elsewhere_are_named_and_not_mounted(home: Path) -> None:
    python = make_venv(home / "v")
    site = home / f"v/lib/python{VERSION}/site-packages"
    for name in ("by_pth", "by_finder", "by_url", "by_link", "by_egg"):
        (home / "src" / name).mkdir(parents=True)
    (site / "old.pth").write_text(f"# comment\nimport sys\n{home}/src/by_pth\n{home}/src/absent\n")
    (site / "__editable___x_finder.py").write_text(
        f"MAPPING: dict[str, str] = {{'x': '{home}/src/by_finder'}}\nNAMESPACES = {{}}\n"
    )
    (site / "y-1.dist-info").mkdir()
    (site / "y-1.dist-info/direct_url.json").write_text(
        json.dumps({"url": f"file://{home}/src/by_url", "dir_info": {"editable": True}})
    )
    (site / "z").symlink_to(home / "src/by_link")
    (site / "e.egg-link").write_text(f"{home}/src/by_egg\n.")
    environment = find([str(python)], home)
    assert set(environment.unmounted) == {
        str(home / "src" / name) for name in ("by_pth", "by_finder", "by_url", "by_link", "by_egg")
    }
    assert targets(environment) == {str(home / "v")}
    assert len(environment.notes) == 5


def test_user_site_is_named_only_for_an_interpreter_that_uses_it(home: Path) -> None:
    site = home / f".local/lib/python{VERSION}/site-packages"
    site.mkdir(parents=True)
    assert find(["python3"], home).unmounted == (str(site),)
    assert find([str(make_venv(home / "v"))], home).unmounted == ()


def test_packages_of_r_and_julia_in_the_home_are_named(home: Path) -> None:
    expected = {"R": home / "R/x86_64-pc-linux-gnu-library/4.4", "julia": home / ".julia/packages"}
    for program, folder in expected.items():
        folder.mkdir(parents=True)
        tool = home.parent.parent / f"opt/{program}/bin/{program}"
        tool.parent.mkdir(parents=True)
        (tool.parent.parent / "share").mkdir()
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
        environment = find([str(tool)], home)
        assert targets(environment) == {str(tool.parent.parent)}
        assert environment.unmounted == (str(folder),)


def test_notes_carry_no_control_characters(home: Path) -> None:
    python = make_venv(home / "v")
    (home / "v/\x1b[31mred").mkdir()
    assert all("\x1b" not in note for note in find([str(python)], home).notes)


# -- the stage's interpreter ------------------------------------------------------------------------


def test_stage_python_runs_with_its_binds_alone(home: Path) -> None:
    python, binds = stage_python()
    assert not any(bind.target in (str(Path.home()), "/root", "/home") for bind in binds)
    code = "import ctypes, _socket, array, marshal, resource; print(ctypes.CDLL(None).getpid() > 0)"
    environment = Environment(binds=binds)
    assert inside(environment, [python, "-I", "-S", "-E", "-c", code], home).strip() == "True"


def test_stage_python_of_a_venv_over_another_python(home: Path) -> None:
    base = make_python(home / "versions/9")
    python = make_venv(home / "v", base)
    done = subprocess.run(
        [python, "-S", "-c", "import sys; print(sys.executable, getattr(sys, '_base_executable', ''))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[0] == str(python), "the control: the venv's python starts"
    assert os.path.realpath(done.stdout.split()[1]) == str(base)

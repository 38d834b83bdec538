"""Finding the language environment of a kernel on the host: what to mount, and which variables it needs.

The answer is the least that runs the command: the prefix of its interpreter, the prefix that one was made
from, never the folder around them. What the environment names elsewhere is listed, not mounted.

Sources: PEP 405 (pyvenv.cfg), execvp(3), execve(2) (interpreter scripts), pyenv's README (choosing the
version), conda's documentation (activation).
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Mapping, Sequence

from ..ledger.events import escape
from . import conda, packages, prefixes, pyenv
from .base import Bind, Environment, SandboxError
from .etc import in_system, system_path
from .sensitive import all_homes, sensitive
from .stage_python import STORES, stage_python
from .variables import kernel_environment, packages_dir

__all__ = ["Bind", "Environment", "discover", "kernel_environment", "stage_python"]

_MOST_HOPS = 40
_DEEPEST = 8
_MOST_NAMES = 64
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh"))
_CONDA_TOOLS = frozenset(("conda", "mamba", "micromamba"))
_NAME_IN_SCRIPT = re.compile(r"(?:~|\$HOME|\$\{HOME\})?/[\w.+@%/-]+")


def discover(
    argv: Sequence[str], env: Mapping[str, str] | None = None, *, cwd: str | None = None
) -> Environment:
    """Find the environment that a command runs in.

    Args:
        argv: the command as the kernelspec or the caller names it; a bare argv[0] is searched on PATH.
        env: the variables the command would have had (PATH, HOME, PYENV_VERSION, PYTHONPATH); None means ours.
        cwd: what a relative argv[0] is relative to; None means our working folder.

    Raises:
        FileNotFoundError, PermissionError: argv[0] (or an interpreter it names) does not exist or cannot be
            executed, as subprocess.Popen would say.
        SandboxError: `validation`, when the environment is, or lies in, something that is never mounted.
    """
    search = _Search(dict(os.environ if env is None else env), cwd or os.getcwd())
    if not argv:
        raise SandboxError("validation", "The command is empty.", "Name a program to run.")
    search.command(list(argv))
    return search.result()


class _Search:
    """Collects binds (target to source), links (name to text), and what a person should know."""

    def __init__(self, env: dict[str, str], cwd: str) -> None:
        self.env = env
        self.cwd = cwd
        self.home = env.get("HOME") or os.path.expanduser("~")
        self.homes = tuple(dict.fromkeys((self.home, os.path.realpath(self.home), *all_homes())))
        self.binds: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.path: list[str] = []
        self.variables: dict[str, str] = {}
        self.notes: list[str] = []
        self.unmounted: dict[str, None] = {}
        self._seen: set[str] = set()
        self._python = False

    # -- commands -------------------------------------------------------------------------------

    def command(self, argv: list[str], depth: int = 0) -> None:
        """Follow a command and what it starts in turn."""
        if depth > _DEEPEST or not argv:
            return
        file = self.find(argv[0])
        self.executable(file, depth)
        tool, rest = os.path.basename(file), argv[1:]
        if tool == "env":
            self.command(_after_env(rest), depth + 1)
        elif tool in _CONDA_TOOLS and rest[:1] == ["run"]:
            prefix, inner = conda.run_target(file, rest[1:], self.env)
            self.add_prefix(prefix, leading=True)
            self.env["PATH"] = f"{prefix}/bin:{self.env.get('PATH', os.defpath)}"
            self.command(inner, depth + 1)
        elif tool in _SHELLS:
            for argument in rest:
                self.names_in(argument, depth)
        else:
            for argument in rest:
                self.argument(argument, depth)

    def find(self, name: str) -> str:
        """The absolute name of a program, found as execvp(3) does."""
        if "/" in name:
            candidates = [os.path.join(self.cwd, name)]
        else:
            folders = self.env.get("PATH", os.defpath).split(":")
            candidates = [os.path.join(self.cwd, folder, name) for folder in folders]
        failed = errno.ENOENT
        for candidate in candidates:
            if os.path.exists(candidate):
                if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                    return _plain(candidate)
                failed = errno.EACCES
        raise OSError(failed, os.strerror(failed), name)

    def argument(self, text: str, depth: int) -> None:
        """An argument may name an environment, a program of one, or the kernelspec's own folder."""
        if not text.startswith("/") or in_system(text) or "\0" in text:
            return
        path = _plain(text)
        if os.path.isdir(path):
            if prefixes.kind_of(path) in ("venv", "conda"):
                self.add_prefix(path, leading=True)
        elif os.path.isfile(path):
            folder = os.path.dirname(path)
            if os.path.basename(folder) == "bin" and os.access(path, os.X_OK):
                if prefixes.kind_of(os.path.dirname(folder)) in ("venv", "conda", "python"):
                    self.executable(path, depth + 1)
            elif os.path.basename(os.path.dirname(folder)) == "kernels" and os.path.isfile(
                f"{folder}/kernel.json"
            ):
                self.bind(folder)

    def names_in(self, text: str, depth: int) -> None:
        """Environments that a shell script or `-c` text names by their absolute path."""
        for name in list(dict.fromkeys(_NAME_IN_SCRIPT.findall(text)))[:_MOST_NAMES]:
            path = re.sub(r"^(~|\$HOME|\$\{HOME\})", lambda _: self.home, name)
            if path.endswith("/bin/activate") and os.path.isfile(path):
                path = path.removesuffix("/bin/activate")
            if os.path.exists(path):
                self.argument(path, depth)

    # -- programs -------------------------------------------------------------------------------

    def executable(self, file: str, depth: int, *, leading: bool = True, base: bool = False) -> None:
        """Mount what a program needs: its prefix, each link on the way to it, its interpreter.

        `leading` programs give PATH and variables; the `base` of a venv only lends its files.
        """
        if file in self._seen or depth > _DEEPEST:
            return
        self._seen.add(file)
        if os.path.basename(os.path.dirname(file)) == "shims":
            real = pyenv.real_program(file, self.env, self.cwd)
            self.links[file] = real
            self.executable(real, depth + 1)
            return
        hops = _hops(file)
        for hop, following in zip(hops, [*hops[1:], ""], strict=True):
            if in_system(hop):
                continue
            if hop == file or not following:
                self.program(hop, leading=leading and hop == file)
            if following and not self.covered(hop):
                self.links[hop] = following
        if not in_system(file) and leading:
            self.lead(os.path.dirname(file))
        self.script(hops[-1], depth)
        if not base and re.fullmatch(r"python[\d.]*t?", os.path.basename(hops[-1])):
            self.user_site(os.path.basename(hops[-1]), file)
        self.user_library(os.path.basename(file))

    def program(self, file: str, *, leading: bool) -> None:
        """Mount the prefix that a program outside the system's folders belongs to, else the file alone."""
        for store in STORES:
            if file.startswith(store + "/"):
                self.binds[store] = store
                return
        folder, name = os.path.split(file)
        prefix = os.path.dirname(folder)
        if os.path.isfile(f"{folder}/pyvenv.cfg"):  # PEP 405 allows it beside the interpreter
            prefix = folder
        kind = prefixes.kind_of(prefix) if os.path.basename(folder) in ("bin", "condabin", "sbin") else None
        if kind in ("venv", "conda") or prefix == folder:
            self.add_prefix(prefix, leading=leading)
        elif kind == "python" and prefixes.is_shared(os.path.realpath(prefix), self.homes):
            for part in prefixes.python_parts(os.path.realpath(file)):
                self.bind(part)
            self._python = self._python or name.startswith("python")
        elif kind in ("python", "program") and not prefixes.is_shared(os.path.realpath(prefix), self.homes):
            self.add_prefix(prefix, leading=leading)
        elif not os.path.islink(file):
            self.bind(file)

    def add_prefix(self, prefix: str, *, leading: bool) -> None:
        """Mount an installation, and everything it was made from."""
        if f"{prefix}/" in self._seen:
            return
        self._seen.add(f"{prefix}/")
        real = os.path.realpath(prefix)
        prefixes.refuse_dangerous(real, self.homes)
        mount, left = prefixes.parts(real)
        for part in mount:
            if os.path.islink(part):  # lib64 -> lib
                self.links[part] = os.readlink(part)
            else:
                self.binds[part] = part
        if prefix != real:
            self.links[prefix] = real
        foreign = [name for name in left if not name.startswith(".") and name not in ("envs", "pkgs")]
        if foreign:
            shown = ", ".join(escape(name) for name in foreign[:5]) + (" …" if len(foreign) > 5 else "")
            self.notes.append(f"Not part of the environment {escape(prefix)}, and not mounted: {shown}")
        kind = prefixes.kind_of(prefix)
        if kind == "venv":
            self.venv(prefix, leading=leading)
        elif kind == "conda" and leading:
            variables, notes = conda.activation(prefix)
            self.variables = variables | self.variables
            self.notes += notes
        if leading:
            self.lead(f"{prefix}/bin")
        for library in prefixes.python_libraries(real):
            self._python = True
            self.outside(f"{library}/site-packages")

    def venv(self, prefix: str, *, leading: bool) -> None:
        """The installation a venv was made from (PEP 405: `home` is the folder of its interpreter)."""
        settings = _settings(f"{prefix}/pyvenv.cfg")
        if leading:
            self.variables.setdefault("VIRTUAL_ENV", prefix)
        home = settings.get("home", "")
        version = ".".join(settings.get("version", settings.get("version_info", "")).split(".")[:2])
        names = [f"python{version}", "python3", "python"] if version else ["python3", "python"]
        for name in names:
            base = _plain(os.path.join(prefix, home, name))
            if home and os.path.isfile(base):
                self.executable(base, 0, leading=False, base=True)
                break
        else:
            raise SandboxError(
                "validation",
                f"The Python that the venv {escape(prefix)} was made from is gone ({escape(home) or 'unnamed'}).",
                "Make the venv again: python3 -m venv --clear FOLDER",
            )
        if settings.get("include-system-site-packages", "").lower() == "true":
            self.user_site(f"python{version}", "")

    def script(self, file: str, depth: int) -> None:
        """The interpreter of a script, and for a shell script the environments that it names."""
        try:
            with open(file, "rb") as opened:
                if opened.read(2) != b"#!":
                    return
                first, _, rest = opened.read(1 << 16).partition(b"\n")
        except OSError:
            return
        words = os.fsdecode(first).strip().split(None, 1)
        if not words:
            return
        interpreter = words[0]
        arguments = words[1].split() if len(words) > 1 else []
        if os.path.basename(interpreter) == "env":
            self.command([interpreter, *arguments], depth + 1)
        else:
            self.executable(self.find(interpreter), depth + 1, leading=False)
        shell = os.path.basename(interpreter) in _SHELLS or set(arguments) & _SHELLS
        if shell and not in_system(file):
            self.names_in(os.fsdecode(rest), depth + 1)

    # -- what lies elsewhere --------------------------------------------------------------------

    def outside(self, site: str) -> None:
        """Note the packages that a site-packages folder takes from elsewhere."""
        for path, name in packages.outside(site):
            self.leave(path, f"named by {escape(name)} of the environment")

    def user_site(self, python: str, file: str) -> None:
        """Note packages in the user's site folder, which an interpreter outside a venv would use."""
        version = re.search(r"\d+\.\d+t?", python)
        prefix = os.path.dirname(os.path.dirname(file))
        if version is None or (file and os.path.isfile(f"{prefix}/pyvenv.cfg")):
            return
        base = self.env.get("PYTHONUSERBASE") or f"{self.home}/.local"
        site = f"{base}/lib/python{version[0]}/site-packages"
        if os.path.isdir(site):
            self.leave(site, "packages installed with pip --user")

    def user_library(self, program: str) -> None:
        """Note the packages that R and Julia keep in the home."""
        if program in ("R", "Rscript"):
            for folder in sorted(glob.glob(f"{glob.escape(self.home)}/R/*-library/*/")):
                self.leave(folder.rstrip("/"), "R packages of the user")
        elif program == "julia":
            for name in ("packages", "artifacts", "compiled", "environments", "registries"):
                if os.path.isdir(f"{self.home}/.julia/{name}"):
                    self.leave(f"{self.home}/.julia/{name}", "Julia packages of the user")

    def leave(self, path: str, why: str) -> None:
        """Something the environment names that is not mounted without an approval."""
        real = os.path.realpath(path)
        if in_system(real) or self.covered(real) or real in self.unmounted:
            return
        self.unmounted[real] = None
        if sensitive(real, self.homes):
            self.notes.append(f"Never mounted: {escape(real)} ({why})")
        else:
            self.notes.append(f"Not mounted: {escape(real)} ({why}); list it under `inputs` to use it")

    # -- the result -----------------------------------------------------------------------------

    def bind(self, path: str) -> None:
        """Mount one file or folder, at its real name and at the one given."""
        real = os.path.realpath(path)
        if reason := sensitive(real, self.homes) or sensitive(path, self.homes):
            raise SandboxError(
                "validation",
                f"The command needs {escape(path)}, which lies where {reason} are.",
                "Move it to a folder of its own.",
            )
        self.binds[real] = real
        if path != real and not in_system(path):
            self.links[path] = real

    def lead(self, folder: str) -> None:
        """A folder for PATH."""
        if folder not in self.path:
            self.path.append(folder)

    def covered(self, path: str) -> bool:
        """Whether a name is visible inside already."""
        return any(path == target or path.startswith(target + "/") for target in self.binds)

    def result(self) -> Environment:
        """The environment, without what is there twice."""
        for entry in self.env.get("PYTHONPATH", "").split(":"):
            if entry.startswith("/") and os.path.isdir(entry):
                self.leave(entry, "on PYTHONPATH")
        binds: dict[str, str] = {}
        for target in sorted(self.binds, key=lambda name: name.split("/")):
            if not in_system(target) and not any(target.startswith(above + "/") for above in binds):
                binds[target] = self.binds[target]
        self.binds = binds
        links: dict[str, str] = {}
        for name in sorted(self.links, key=lambda link: link.split("/")):
            # What lies below a link or a bind is there with it.
            if (
                not in_system(name)
                and not self.covered(name)
                and not any(name.startswith(f"{n}/") for n in links)
            ):
                links[name] = self.links[name]
        if self._python or any(os.path.basename(name).startswith("python") for name in self._seen):
            # Python must find the folder when it starts; a link in it makes it exist.
            links[f"{packages_dir(self.home)}/.keep"] = "/nonexistent"
        folders = [name for name in self.path if self.visible(name, links)]
        return Environment(
            binds=tuple(Bind(source=source, target=target) for target, source in binds.items()),
            links=tuple((text, name) for name, text in sorted(links.items())),
            path=tuple(dict.fromkeys((*folders, *system_path()))),
            variables=self.variables,
            notes=tuple(dict.fromkeys(self.notes)),
            unmounted=tuple(self.unmounted),
        )

    def visible(self, folder: str, links: Mapping[str, str]) -> bool:
        """Whether a folder for PATH holds something inside."""
        inside = folder + "/"
        return (
            self.covered(folder)
            or self.covered(os.path.realpath(folder))
            or any(name.startswith(inside) for name in (*self.binds, *links))
        )


def _plain(path: str) -> str:
    """An absolute name without `.`, `..` and doubled slashes, that means the same with links on the way."""
    if any(part == ".." for part in path.split("/")):
        folder, name = os.path.split(path)
        return os.path.realpath(path) if name in ("", ".", "..") else f"{os.path.realpath(folder)}/{name}"
    return os.path.normpath(path)


def _hops(file: str) -> list[str]:
    """A program's name, each name its links lead through, and last its real file."""
    hops = [file]
    while os.path.islink(hops[-1]) and len(hops) < _MOST_HOPS:
        folder = os.path.dirname(hops[-1])
        text = os.readlink(hops[-1])
        # A relative text is relative to the real folder, whatever name led there.
        hops.append(_plain(text if text.startswith("/") else os.path.join(os.path.realpath(folder), text)))
    real = os.path.realpath(file)
    if hops[-1] != real:
        hops.append(real)
    return hops


def _after_env(arguments: list[str]) -> list[str]:
    """The command that env(1) would start."""
    rest = list(arguments)
    while rest:
        first = rest.pop(0)
        if first in ("-S", "--split-string") and rest:
            rest = [*rest.pop(0).split(), *rest]
        elif first.startswith("-S"):
            rest = [*first[2:].split(), *rest]
        elif first in ("-u", "--unset", "-C", "--chdir"):
            rest = rest[1:]
        elif not first.startswith("-") and "=" not in first:
            return [first, *rest]
    return []


def _settings(path: str) -> dict[str, str]:
    """The `name = value` lines of a pyvenv.cfg."""
    with open(path, errors="surrogateescape") as file:
        pairs = [line.partition("=") for line in file.read(1 << 16).splitlines() if "=" in line]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}

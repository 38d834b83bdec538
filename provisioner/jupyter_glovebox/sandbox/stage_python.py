"""The interpreter that runs the inner stage, with the fewest files it needs."""

from __future__ import annotations

import os
import sys

from .base import Bind, SandboxError
from .etc import in_system

# Content-addressed stores: a program's libraries are spread over them, nothing private is in them.
STORES = ("/nix/store", "/gnu/store")


def stage_python() -> tuple[str, tuple[Bind, ...]]:
    """The supervisor's own base interpreter, for `python -I -S -E stage.py` inside.

    Works for system, pyenv, uv, conda and stand-alone builds, and from any venv over one of them: only
    the executable, its standard library, and the libraries beside it that are loaded now are bound.

    Returns:
        The interpreter's absolute real name, and binds (none when it belongs to the system), parents
        before children. A library is bound under each name that it has in its folder.

    Raises:
        SandboxError: `stage`, when the interpreter's files cannot be found.
    """
    # What the stage imports must be loaded before the loaded libraries are looked up.
    import _socket  # noqa: F401
    import array
    import ctypes

    executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable or "/proc/self/exe")
    library = os.path.realpath(os.path.dirname(os.__file__ or ""))
    if not os.path.isfile(executable) or not os.path.isfile(f"{library}/os.py"):
        raise SandboxError(
            "stage",
            f"The files of this Python interpreter cannot be found ({executable}, {library}).",
            "Run Jupyter with an ordinary CPython that has its standard library in a folder.",
        )
    for store in STORES:
        if executable.startswith(store + "/"):
            return executable, (Bind(source=store, target=store),)
    wanted = {executable: executable, library: library}
    for module in (array, ctypes):
        folder = os.path.realpath(os.path.dirname(getattr(module, "__file__", None) or library))
        if folder != library and not folder.startswith(library + "/"):
            wanted[folder] = folder  # lib64/pythonX.Y/lib-dynload
    for name, real in _loaded_libraries(os.path.dirname(os.path.dirname(executable))).items():
        wanted[name] = real
    return executable, tuple(
        Bind(source=real, target=name) for name, real in sorted(wanted.items()) if not in_system(name)
    )


def _loaded_libraries(prefix: str) -> dict[str, str]:
    """Shared libraries of this process directly in a library folder of `prefix`: every name to real path."""
    folders = {f"{prefix}/lib", f"{prefix}/lib64"}
    loaded: set[str] = set()
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if path[1] and os.path.dirname("/" + path[2]) in folders:
                loaded.add("/" + path[2])
    names = {path: path for path in loaded}
    for folder in {os.path.dirname(path) for path in loaded}:
        with os.scandir(folder) as entries:
            for entry in entries:
                # A name that ends in .so is for compilers; the loader asks for the versioned one.
                if ".so." in entry.name and entry.is_symlink():
                    real = os.path.realpath(entry.path)
                    if real in loaded:
                        names[entry.path] = real
    return names

"""Packages that an environment takes from outside its own folders: editable installs, path files, links.

They are the user's working copies, not part of the environment, so they are named here and mounted only
after an approval (as inputs).

Sources: Python's site module (path files), PEP 610 (direct_url.json), setuptools' editable finders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_LARGEST = 1 << 18
# MAPPING: dict[str, str] = {'pkg': '/abs/path'} in a generated __editable___*_finder.py
_MAPPED = re.compile(r"""['"](/[^'"\n]+)['"]""")


def outside(site: str) -> list[tuple[str, str]]:
    """What a site-packages folder names elsewhere, as (absolute existing path, how it is named)."""
    found: dict[str, str] = {}
    try:
        with os.scandir(site) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in listed:
        name = entry.name
        paths: Iterable[str] = ()
        if name.endswith((".pth", ".egg-link")):
            paths = _path_file(entry.path)
        elif name.startswith("__editable__") and name.endswith("_finder.py"):
            mapping = _read(entry.path).partition("MAPPING")[2].partition("}")[0]
            paths = _MAPPED.findall(mapping)
        elif name.endswith(".dist-info"):
            paths = _editable(f"{entry.path}/direct_url.json")
        elif entry.is_symlink():
            paths = (os.path.realpath(entry.path),)
        for path in paths:
            full = os.path.normpath(os.path.join(site, path))
            inside = full == site or full.startswith(site + "/")
            if not inside and full not in found and os.path.exists(full):
                found[full] = name
    return sorted(found.items())


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(fd, errors="surrogateescape") as file:
        try:
            return file.read(_LARGEST)
        except OSError:
            return ""


def _path_file(path: str) -> list[str]:
    lines = [line.strip() for line in _read(path).splitlines()]
    return [
        line for line in lines if line and not line.startswith(("#", "import ", "import\t")) and line != "."
    ]


def _editable(path: str) -> list[str]:
    text = _read(path)
    if '"editable"' not in text:
        return []
    import json
    from urllib.parse import unquote, urlsplit

    try:
        content = json.loads(text)
        url = urlsplit(content["url"])
        editable = content["dir_info"]["editable"]
    except (ValueError, KeyError, TypeError):
        return []
    return [unquote(url.path)] if editable and url.scheme == "file" else []

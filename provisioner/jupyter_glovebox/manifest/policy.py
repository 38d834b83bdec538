"""Which policy holds: the admin's, else the user's, else the defaults; then its rules for one notebook."""

from __future__ import annotations

import fnmatch
import grp
import os
import pwd
import stat
from pathlib import Path

from ..errors import RefusedError
from ..locations import ADMIN_POLICY, config_dir
from .loading import load_policy
from .model import Policy, with_section


def current_policy() -> Policy:
    """The policy in force for this user, before its rules.

    Raises:
        RefusedError: the admin's policy can be changed by others than root.
        ManifestError: it is not valid. A policy that cannot be read never means "no policy".
    """
    if os.path.lexists(ADMIN_POLICY):
        _trusted(ADMIN_POLICY)
        return load_policy(ADMIN_POLICY, follow=False)
    own = config_dir() / "policy.yaml"
    return load_policy(own) if os.path.lexists(own) else Policy()


def _trusted(path: Path) -> None:
    for place in (path, path.parent):
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            raise RefusedError(
                f"The policy {path} is not trustworthy: {place} must belong to root, be no link, and be "
                "writable by root alone.",
                f"As root: chown root:root {place} && chmod go-w {place}",
            )


def policy_for(policy: Policy, notebook: str, *, user: str | None = None) -> Policy:
    """Apply the rules that match a notebook's real path (or a working folder) and a user; later rules win.

    Args:
        policy: as read.
        notebook: real path.
        user: user name; default: whoever runs this process.
    """
    name = user if user is not None else _user_name()
    groups: set[str] | None = None
    for rule in policy.rules:
        match = rule["match"]
        if "path" in match and not _matches(notebook, match["path"]):
            continue
        if "user" in match and name not in match["user"]:
            continue
        if "group" in match:
            groups = _groups(name) if groups is None else groups
            if not groups & set(match["group"]):
                continue
        policy = with_section(policy, rule)
    return policy


def _matches(path: str, pattern: str) -> bool:
    """`*` matches within one name, `**` any rest."""
    if pattern.endswith("/**"):
        folder = pattern[:-3]
        depth = folder.count("/")
        start = "/".join(path.split("/")[: depth + 1])
        return path.count("/") > depth and _matches(start, folder)
    parts, names = pattern.split("/"), path.split("/")
    return len(parts) == len(names) and all(map(fnmatch.fnmatchcase, names, parts))


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _groups(user: str) -> set[str]:
    found = {entry.gr_name for entry in grp.getgrall() if user in entry.gr_mem}
    try:
        found.add(grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name)
    except KeyError:
        pass
    return found

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
        RefusedError: the admin's policy can be changed by others than root, or cannot be reached.
        ManifestError: it is not valid. A policy that cannot be read never means "no policy".
    """
    if _exists(ADMIN_POLICY):
        _trusted(ADMIN_POLICY)
        return load_policy(ADMIN_POLICY, managed=True)
    own = config_dir() / "policy.yaml"
    return load_policy(own) if _exists(own) else Policy()


def _exists(path: Path) -> bool:
    """Whether the name is there. Not being allowed to look is no answer."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RefusedError(
            f"Whether there is a policy at {path} cannot be seen: {error.strerror}.",
            f"Make its folder readable: chmod a+rx {path.parent}",
        ) from error
    return True


def _trusted(path: Path) -> None:
    for place in (path, *path.parents):
        found = place.lstat()
        # Others may write to a sticky folder, but not replace what is root's in it.
        shared = found.st_mode & 0o022 and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX)
        if stat.S_ISLNK(found.st_mode) or found.st_uid != 0 or shared:
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
    name = user if user is not None else user_name()
    groups: set[str] | None = None
    for rule in policy.rules:
        match = rule["match"]
        if "path" in match and not _matches(notebook.split("/"), match["path"].split("/")):
            continue
        if "user" in match and name not in match["user"]:
            continue
        if "group" in match:
            groups = _groups(name) if groups is None else groups
            if not groups & set(match["group"]):
                continue
        policy = with_section(policy, rule)
    return policy


def _matches(names: list[str], pattern: list[str]) -> bool:
    """`*` matches within one name, `**` any number of names, also none."""
    # possible[n]: the pattern so far matches the first n names.
    possible = [True] + [False] * len(names)
    for part in pattern:
        if part == "**":
            first = possible.index(True) if True in possible else len(possible)
            possible = [n >= first for n in range(len(possible))]
        else:
            possible = [
                n > 0 and possible[n - 1] and fnmatch.fnmatchcase(names[n - 1], part)
                for n in range(len(possible))
            ]
    return possible[-1]


def user_name() -> str:
    """Who runs this process, from the user database and never from the environment."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _groups(user: str) -> set[str]:
    """The user's groups. Asked as at login: databases such as LDAP do not list the members of a group."""
    numbers: set[int] = set()
    try:
        entry = pwd.getpwnam(user)
        numbers.update(os.getgrouplist(user, entry.pw_gid))
    except KeyError:
        pass
    if user == user_name():
        numbers.update((*os.getgroups(), os.getgid()))
    found = set()
    for number in numbers:
        try:
            found.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return found

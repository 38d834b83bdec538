"""Launch-policy validation: the last look at what is about to be mounted, whoever compiled the plan.

It asks only what no manifest and no policy may override: nothing that reaches out of the sandbox, holds
credentials, or is wider than a person would have meant.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterator

from ..ledger.events import escape
from ..manifest.plan import InputGrant, Plan
from . import filesystems
from .base import Environment, SandboxError
from .sensitive import all_homes, is_key_file, sensitive, sensitive_places

MOST_ENTRIES = 200_000
"""Entries of granted folders that are looked at, together; more are refused."""
_LONGEST_LOOK = 20.0  # seconds
_SHOWN = 5

_NEVER_BELOW = {
    "/proc": "processes of the machine",
    "/sys": "the kernel's settings",
    "/dev": "devices",
    "/run": "sockets of running services",
    "/var/run": "sockets of running services",
    "/boot": "the system's boot files",
}
_NEVER_WHOLE = frozenset(
    ("/", "/home", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/var", "/var/lib", "/var/tmp",  # noqa: S108
     "/var/log", "/var/spool", "/var/cache", "/tmp")  # noqa: S108
)  # fmt: skip
# Working folders: nothing of the host is in them, but the sandbox's own places must stay reachable.
_NO_WORKDIR = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")
_NO_TARGET = ("/proc", "/sys", "/dev", "/run", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")
_FIXED_VARIABLES = re.compile(r"LD_.*|GLIBC_TUNABLES|PATH|HOME|JPY_PARENT_PID")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Violation = tuple[str, str]


def validate(plan: Plan, environment: Environment, *, private_dirs: tuple[str, ...]) -> None:
    """Refuse a launch that would mount what must never be mounted.

    Args:
        plan: also one that no compiler has seen.
        environment: the language environment; its binds are held to the same rules.
        private_dirs: our own state, config and runtime folders, absolute.

    Raises:
        SandboxError: `validation`, with every violation and its remedy.
    """
    rules = _Rules(plan, private_dirs)
    found = [*_shape(plan), *rules.workdir(), *rules.inputs(), *rules.environment(environment)]
    found = list(dict.fromkeys(found))
    if len(found) == 1:
        raise SandboxError("validation", *found[0])
    if found:
        lines = "\n".join(f"- {message} {remedy}".rstrip() for message, remedy in found)
        raise SandboxError("validation", f"{len(found)} rules refuse this launch:\n{lines}")


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_plain(path: str) -> bool:
    return (
        path.startswith("/")
        and os.path.normpath(path) == path
        and not path.startswith("//")
        and "\0" not in path
    )


def _shape(plan: Plan) -> Iterator[Violation]:
    """What a plan from the compiler always has, and one from elsewhere may lack."""
    outputs = plan.outputs
    if outputs is not None:
        path = outputs.path
        plain = path == "." or (path and os.path.normpath(path) == path and not path.startswith(("/", "..")))
        if not plain or "\0" in path:
            yield (
                f"The outputs folder {escape(path)!r} is not a folder inside the working folder.",
                "Use a plain relative name, such as `outputs`.",
            )
        for count in (outputs.max_files, outputs.max_file_size, outputs.max_total_size):
            if count < 0:
                yield ("A limit of the outputs is negative.", "Give it a size or count of 0 or more.")
    for name, value in plan.environment.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            yield (f"The variable {escape(name)!r} has no valid name or value.", "Correct `environment`.")
        elif _FIXED_VARIABLES.fullmatch(name):
            yield (f"The variable {name} is set by the sandbox.", "Remove it from `environment`.")
    budgets = plan.budgets
    for name in ("memory", "cpus", "cpu_time", "wall_time", "processes", "open_files"):
        number = getattr(budgets, name)
        if not math.isfinite(number) or number <= 0:
            yield (f"The budget {name} is {number}.", "Every budget must be a number above 0.")
    if plan.scratch.size <= 0:
        yield (f"The scratch size is {plan.scratch.size}.", "Give the working folder a size.")
    targets: dict[str, str] = {}
    for grant in plan.inputs:
        for name in {grant.path, grant.source}:
            if targets.setdefault(name, grant.source) != grant.source:
                yield (f"Two inputs would lie at {escape(name)}.", "Remove one of them.")
        if outputs is not None and outputs.path != "." and _is_plain(plan.workdir):
            folder = os.path.normpath(f"{plan.workdir}/{outputs.path}")
            if _below(grant.path, folder):
                yield (
                    f"The input {escape(grant.path)} lies in the outputs folder, which is empty at the start.",
                    "Move it elsewhere, or choose another outputs folder.",
                )


class _Rules:
    """The rules about places, with what they need to know of this machine, read once."""

    def __init__(self, plan: Plan, private_dirs: tuple[str, ...]) -> None:
        self.plan = plan
        self.homes = all_homes()
        self.places = sensitive_places(self.homes)
        self.mounts = filesystems.mounts()
        own = [*private_dirs, os.environ.get("JUPYTER_RUNTIME_DIR", "")]
        self.private = {name for path in own if path for name in (path, os.path.realpath(path))}
        self.forbidden = {name for path in plan.forbidden_mounts for name in (path, os.path.realpath(path))}
        self._left = MOST_ENTRIES
        self._until = time.monotonic() + _LONGEST_LOOK

    def workdir(self) -> Iterator[Violation]:
        """The working folder; a home is allowed, since nothing of the host is in it inside."""
        path = self.plan.workdir
        remedy = "Move the notebook to a folder of its own."
        if not _is_plain(path) or path == "/":
            yield (f"The working folder {escape(path)!r} is not a plain absolute folder name.", remedy)
        elif any(_below(path, place) for place in _NO_WORKDIR):
            yield (f"The working folder {escape(path)} belongs to the system.", remedy)
        elif reason := sensitive(path, self.homes):
            yield (f"The working folder {escape(path)} lies where {reason} are.", remedy)
        elif any(_below(path, private) for private in self.private):
            yield (f"The working folder {escape(path)} is this program's own.", remedy)

    def inputs(self) -> Iterator[Violation]:
        """Every input, by the name used and by its real path, and what a granted folder holds."""
        for grant in self.plan.inputs:
            name = escape(grant.path)
            bad = [path for path in (grant.path, grant.source) if not _is_plain(path)]
            if bad:
                yield (
                    f"The input {escape(bad[0])!r} is not a plain absolute name.",
                    "Approve the manifest again.",
                )
                continue
            if any(_below(grant.path, place) for place in ("/proc", "/sys", "/dev", "/run")):
                yield (f"The input {name} would lie in a folder of the sandbox's own.", "Give its real name.")
                continue
            refused = list(self._source(grant.source, f"The input {name}"))
            refused += self._place(grant.path, f"The input {name}")
            now = os.path.realpath(grant.path)
            if now != grant.source and os.path.lexists(grant.path):
                refused.append(
                    (
                        f"The input {name} leads to {escape(now)} now, not to the approved {escape(grant.source)}.",
                        "Look at the link, then approve the manifest again.",
                    )
                )
            refused = refused or list(self._content(grant))
            yield from refused

    def environment(self, environment: Environment) -> Iterator[Violation]:
        """Every bind and link of the language environment."""
        for bind in environment.binds:
            what = f"The environment's {escape(bind.target)}"
            if not _is_plain(bind.source) or not _is_plain(bind.target):
                yield (f"{what} is not a plain absolute name.", "Register the kernel again.")
                continue
            yield from self._source(bind.source, what)
            yield from self._target(bind.target, what)
        for _, name in environment.links:
            if not _is_plain(name):
                yield (f"The environment's link {escape(name)!r} is not a plain absolute name.", "")
            else:
                yield from self._target(name, f"The environment's link {escape(name)}")

    def _target(self, target: str, what: str) -> Iterator[Violation]:
        if any(_below(target, place) for place in _NO_TARGET):
            yield (f"{what} would lie in a folder that the sandbox makes itself.", "Move the environment.")
        for own, named in ((self.plan.workdir, "the working folder"), (os.path.expanduser("~"), "the home")):
            if _below(own, target):
                yield (
                    f"{what} holds {named} {escape(own)}.",
                    "Keep the environment in a folder of its own, such as `.venv`.",
                )

    def _source(self, source: str, what: str) -> Iterator[Violation]:
        """A host path that will be mounted: it exists, is real, is of a kind and in a place that may be."""
        try:
            mode = os.lstat(source).st_mode
        except OSError as error:
            yield (f"{what} cannot be found: {escape(source)}: {error.strerror}.", "Check that it exists.")
            return
        real = os.path.realpath(source)
        if real != source:
            yield (
                f"{what} is reached through a link: {escape(source)} leads to {escape(real)}.",
                "Look at the link, then approve the manifest again.",
            )
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            yield (
                f"{what} is {_kind(mode)}.",
                "Only files and folders can be inputs; copy the data to a file.",
            )
            return
        yield from self._place(real, what)
        for point, kind in filesystems.seen_from(real, self.mounts):
            if reason := filesystems.why_never(kind):
                yield (
                    f"{what} shows {escape(point)}, {reason}.",
                    "Copy the data to a folder on a local disk.",
                )
            elif point != real and _below(point, real):
                yield from self._place(point, what)

    def _place(self, path: str, what: str) -> Iterator[Violation]:
        """Whether a name may be mounted at all: it is, or lies in, or holds no forbidden place."""
        narrower = "Name the files or the subfolder that the notebook reads."
        if path in _NEVER_WHOLE:
            yield (f"{what} is all of {escape(path)}.", narrower)
            return
        for place, held in _NEVER_BELOW.items():
            if _below(path, place):
                yield (f"{what} lies in {place}: {held} are never mounted.", "Copy the data to a plain file.")
                return
        if path in self.homes:
            yield (f"{what} is a whole home folder.", narrower)
            return
        if reason := sensitive(path, self.homes):
            yield (f"{what} lies where {reason} are; no manifest can allow it.", "Copy the data elsewhere.")
            return
        if _below(path, "/etc") and not _for_everybody(path):
            yield (f"{what} is a file of the system that not everybody may read.", "Copy the data elsewhere.")
        for private in self.private:
            if _below(path, private) or _below(private, path):
                yield (
                    f"{what} is, lies in, or holds a private folder of this program or of Jupyter.",
                    narrower,
                )
        for place in self.forbidden:
            if _below(path, place) or _below(place, path):
                yield (f"{what} is forbidden by policy ({escape(place)}).", "Ask who maintains the policy.")
        inside = path + "/"
        for home in self.homes:
            if home.startswith(inside):
                yield (f"{what} holds the home {escape(home)}.", narrower)
        for place, reason in self.places:
            if place.startswith(inside) and os.path.lexists(place):
                yield (f"{what} holds {reason} ({escape(place)}).", narrower)

    def _content(self, grant: InputGrant) -> Iterator[Violation]:
        """What a granted folder holds: no socket, device, pipe or key, as far as it is now."""
        if not os.path.isdir(grant.source):
            return
        bad: list[str] = []
        stack = [grant.source]
        while stack and len(bad) < _SHOWN:
            folder = stack.pop()
            try:
                entries = os.scandir(folder)
            except PermissionError:
                continue  # the sandbox has no more rights than we have
            except OSError as error:
                yield (f"The folder {escape(folder)} cannot be listed: {error.strerror}.", "Name its files.")
                return
            with entries:
                for entry in entries:
                    self._left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        if is_key_file(entry.name):
                            bad.append(f"{escape(entry.path)} (a key or token)")
                    elif not entry.is_symlink():
                        kind = _kind(entry.stat(follow_symlinks=False).st_mode)
                        bad.append(f"{escape(entry.path)} ({kind})")
            if self._left < 0 or time.monotonic() > self._until:
                yield (
                    f"The input {escape(grant.path)} holds too much to be checked "
                    f"(more than {MOST_ENTRIES} entries in all inputs, or a very slow disk).",
                    "Name the files or subfolders that the notebook reads.",
                )
                return
        if bad:
            yield (
                f"The input {escape(grant.path)} holds what is never mounted: {', '.join(bad[:_SHOWN])}.",
                "Move it out of the folder, or name the files that the notebook reads.",
            )


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return name
    return "neither a file nor a folder"


def _for_everybody(path: str) -> bool:
    try:
        return bool(os.stat(path).st_mode & stat.S_IROTH)
    except OSError:
        return False

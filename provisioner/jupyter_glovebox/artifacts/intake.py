"""Takes files in from a folder that hostile code wrote: no links, no surprises, bounded everything.

The folder is walked by descriptor (openat2 with RESOLVE_BENEATH, NO_SYMLINKS, NO_MAGICLINKS, NO_XDEV), so
no name leads out of it; each file is opened without blocking, checked by its descriptor, and copied to a
private snapshot while it is hashed. Everything seen is in the report.

Sources: openat2(2), open(2), inode(7).
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import hashlib
import os
import platform
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import GloveboxError
from ..ledger.events import escape
from .model import Candidate, Reason

_OPENAT2 = 437  # the same number on x86-64 and aarch64
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_BLOCK = 1 << 20
_MOST_DEPTH = 16
_MOST_NAME = 200
_MOST_ENTRIES = 10_000
_MOST_REPORTED = 200
_RESERVED = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"com{n}" for n in range(1, 10)),
    *(f"lpt{n}" for n in range(1, 10)),
}
# Names under which programs look for instructions in the folder where they are started or in a home.
# Jupyter and IPython read their configuration from the current folder.
_INSTRUCTIONS = (
    "jupyter*_config.json", "ipython*_config.json", "glovebox.yaml", "*.glovebox.yaml", "authorized_keys*",
    "makefile", "gnumakefile", "justfile", "rakefile", "gemfile", "vagrantfile", "jenkinsfile", "procfile",
    "dockerfile", "containerfile", "docker-compose.*", "compose.yaml", "compose.yml", "package.json",
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _open(folder: int, name: bytes, flags: int) -> int:
    # openat2 refuses flags that mean nothing together, as these do with O_PATH.
    waiting = 0 if flags & os.O_PATH else os.O_NONBLOCK | os.O_NOCTTY
    how = _OpenHow(flags | os.O_CLOEXEC | os.O_NOFOLLOW | waiting, 0, _RESOLVE)
    fd = _libc.syscall(
        ctypes.c_long(_OPENAT2), ctypes.c_int(folder), ctypes.c_char_p(name), ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )  # fmt: skip
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(fd)


def collect(
    root_fd: int,
    snapshots: Path,
    *,
    max_files: int,
    max_file_size: int,
    max_total_size: int,
    skip: Iterable[str] = (),
    only: str | None = None,
) -> list[Candidate]:
    """Take in every regular file below a directory descriptor.

    Args:
        root_fd: the folder; its content is hostile and may change meanwhile.
        snapshots: private empty host folder for the copies.
        max_files: files taken in; further ones are refused.
        max_file_size, max_total_size: bytes.
        skip: relative names that are not looked at (inputs).
        only: take in just this entry of the folder itself.

    Raises:
        GloveboxError: the snapshot folder cannot take the copies (full disk).
    """
    if platform.machine() not in ("x86_64", "aarch64"):
        raise GloveboxError(f"openat2 is not known for {platform.machine()}.")
    intake = _Intake(snapshots, max_files, max_file_size, max_total_size)
    skipped = {os.fsencode(name) for name in skip}
    if only is not None:
        intake.take(os.fsencode(only), root_fd, os.fsencode(only))
        return intake.result()
    for name, folder, part in _walk(root_fd, skipped, intake):
        intake.take(name, folder, part)
    return intake.result()


def _walk(root_fd: int, skipped: set[bytes], intake: _Intake) -> Iterator[tuple[bytes, int, bytes]]:
    """Every entry that is no folder, as (relative name, folder descriptor, last part); bounded in depth and count."""
    pending: list[tuple[bytes, int]] = [(b"", 0)]
    while pending:
        prefix, depth = pending.pop()
        try:
            folder = _open(root_fd, prefix or b".", os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            intake.refuse(prefix, "unreadable", f"the folder cannot be opened: {error.strerror}")
            continue
        try:
            for part in sorted(os.fsencode(n) for n in _names(folder, intake)):
                name = prefix + b"/" + part if prefix else part
                if name in skipped:
                    continue
                try:
                    mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
                except OSError:
                    continue  # gone again
                if not stat.S_ISDIR(mode):
                    yield name, folder, part
                elif depth + 1 >= _MOST_DEPTH:
                    intake.refuse(name, "depth", f"folders are nested deeper than {_MOST_DEPTH}")
                else:
                    pending.append((name, depth + 1))
        finally:
            os.close(folder)


def _names(folder: int, intake: _Intake) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            intake.entries += 1
            if intake.entries > _MOST_ENTRIES:
                intake.overflow += 1
                if intake.overflow > 10 * _MOST_ENTRIES:
                    break  # counting further would let the sandbox choose how long we work
                continue
            names.append(entry.name)
    return names


class _Intake:
    """Copies files and keeps the bounds."""

    def __init__(self, snapshots: Path, max_files: int, max_file_size: int, max_total_size: int) -> None:
        self._snapshots = snapshots
        self._max_files = max_files
        self._max_file_size = max_file_size
        self._max_total_size = max_total_size
        self._taken: list[Candidate] = []
        self._refused: list[Candidate] = []
        self._names: dict[str, bytes] = {}
        self._total = 0
        self.entries = 0
        self.overflow = 0

    def refuse(self, name: bytes, code: str, message: str, remedy: str = "") -> None:
        """Report an entry that is not taken in; beyond a number they are only counted."""
        if len(self._refused) >= _MOST_REPORTED:
            self.overflow += 1
            return
        reason = Reason(code=code, message=message, remedy=remedy)
        self._refused.append(Candidate(name=os.fsdecode(name), reasons=(reason,)))

    def take(self, name: bytes, folder: int, part: bytes) -> None:
        """Copy one file, or refuse it."""
        if problem := _bad_name(name):
            self.refuse(name, "name", problem, "Give the file a plain name.")
            return
        try:
            fd = _open_regular(folder, part)
        except PermissionError:
            self.refuse(name, "unreadable", "the file cannot be read", "Give it read permission (chmod u+r).")
            return
        except OSError as error:
            what = "is a link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
            self.refuse(name, "not-regular", f"the entry {what}", "Write a regular file.")
            return
        if fd is None:
            self.refuse(name, "not-regular", "the entry is no regular file", "Write a regular file.")
            return
        try:
            found = os.fstat(fd)
            if found.st_nlink != 1:
                self.refuse(name, "hard-link", f"the file has {found.st_nlink} names", "Write a copy.")
            elif twin := self._names.get(_folded(name)):
                self.refuse(
                    name, "name", f"the name is the same as {escape(twin)} on other systems", "Rename one of them.",
                )  # fmt: skip
            elif len(self._taken) >= self._max_files:
                self.refuse(name, "count", f"more than {self._max_files} files", "Raise outputs.max_files.")
            elif found.st_size > self._max_file_size:
                self.refuse(
                    name, "size", f"{found.st_size} bytes; allowed are {self._max_file_size}",
                    "Raise outputs.max_file_size, or write less.",
                )  # fmt: skip
            elif self._total + found.st_size > self._max_total_size:
                self.refuse(
                    name, "total-size", f"all files together exceed {self._max_total_size} bytes",
                    "Raise outputs.max_total_size, or write less.",
                )  # fmt: skip
            else:
                self._copy(name, fd, found.st_size)
        finally:
            os.close(fd)

    def _copy(self, name: bytes, fd: int, size: int) -> None:
        target = self._snapshots / f"{len(self._taken):05d}"
        digest, copied = hashlib.sha256(), 0
        try:
            out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(out, "wb", buffering=0) as file:
                while block := os.read(fd, _BLOCK):
                    copied += len(block)
                    if copied > size:
                        break
                    digest.update(block)
                    file.write(block)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise GloveboxError(
                f"The outputs could not be copied for checking: {error.strerror}.",
                "Free space in the state folder.",
            ) from error
        if copied != size:
            target.unlink()
            self.refuse(
                name, "changing", "the file changed while it was read", "Finish writing, then export."
            )
            return
        self._total += size
        self._names[_folded(name)] = name
        self._taken.append(
            Candidate(name=os.fsdecode(name), snapshot=str(target), size=size, sha256=digest.hexdigest())
        )

    def result(self) -> list[Candidate]:
        """Everything taken in and refused, by name; a last line for what was only counted."""
        every = sorted([*self._taken, *self._refused], key=lambda c: c.name)
        if self.overflow:
            reason = Reason(
                code="count",
                message=f"at least {self.overflow} further entries were not looked at",
                remedy="Write fewer files into the outputs folder.",
            )
            every.append(Candidate(name="…", reasons=(reason,)))
        return every


def _open_regular(folder: int, part: bytes) -> int | None:
    """Open a regular file for reading, None for anything else: a device or a FIFO is never opened itself."""
    place = _open(folder, part, os.O_PATH)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return None
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _folded(name: bytes) -> str:
    """What systems that ignore case, or the way accents are written, take a name for."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name.decode()).casefold())


def _bad_name(name: bytes) -> str:
    """Why a name may not leave, or nothing."""
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        return "the name is not UTF-8"
    for part in text.split("/"):
        if len(part.encode()) > _MOST_NAME:
            return f"the name is longer than {_MOST_NAME} bytes"
        if any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for c in part):
            return "the name has control or invisible characters"
        if part.startswith((".", "-", "~")) or part != part.strip() or part.endswith("."):
            return "the name starts with a dot, dash or tilde, or ends with a dot or space"
        # Letters of full width and the like become the plain ones elsewhere.
        plain = unicodedata.normalize("NFKC", part)
        if (
            any(c in plain for c in '/\\:*?"<>|')
            or plain.startswith(".")
            or part.split(".")[0].lower() in _RESERVED
        ):
            return "the name means something special on other systems"
    if any(fnmatch.fnmatchcase(text.rpartition("/")[2].lower(), name) for name in _INSTRUCTIONS):
        return "programs take a file of this name for instructions"
    return ""

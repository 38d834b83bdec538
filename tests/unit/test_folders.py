"""Folders that hostile code wrote: measured and removed whatever their form."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_glovebox.supervisor.folders import DiskScratch, remove_tree

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an ordinary user can reach (pytest's own belong to the user of the run alone)."""
    made = Path(tempfile.mkdtemp(prefix="glovebox-folders-"))
    yield made
    if made.exists():
        assert remove_tree(str(made))


@contextmanager
def ordinary(folder: Path) -> Iterator[None]:
    """Without root's right to pass over modes."""
    if os.getuid():
        yield
        return
    os.chown(folder, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def _nest(folder: Path, levels: int) -> None:
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def test_the_deep_tree_defeats_what_recurses(folder: Path) -> None:
    """The control: the standard library's removal gives up on what `remove_tree` removes."""
    _nest(folder, 2500)
    with pytest.raises((RecursionError, OSError)):
        list(os.fwalk(folder, onerror=_raise)) and shutil.rmtree(folder)
    assert remove_tree(str(folder))
    assert not folder.exists()


def _raise(error: OSError) -> None:
    raise error


def test_removes_what_has_no_rights_and_no_plain_names(folder: Path) -> None:
    with ordinary(folder):
        for name in ("a", "a/b", "a/b/c", "a/-rf", "a/b/line\nbreak"):
            (folder / name).mkdir()
        (folder / "a/b/c/file").write_bytes(b"x")
        (folder / "a/link").symlink_to("/etc")
        os.mkfifo(folder / "a/pipe")
        for name in ("a/b/c", "a/b", "a"):
            (folder / name).chmod(0)
        with pytest.raises(PermissionError):
            os.listdir(folder / "a")
    assert remove_tree(str(folder))
    assert Path("/etc/passwd").exists()


def test_does_not_follow_a_link_in_the_folders_place(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (folder / "link").symlink_to(kept)
    assert not remove_tree(str(folder / "link"))
    assert (kept / "file").exists()


def test_absent_counts_as_removed(folder: Path) -> None:
    assert remove_tree(str(folder / "nothing"))


def test_within_the_limit_is_no_breach(folder: Path) -> None:
    _nest(folder, 100)
    (folder / "file").write_bytes(b"x" * MIB)
    assert DiskScratch(str(folder), 2 * MIB).check([os.getpid()]) is None


def test_a_file_in_a_closed_folder_counts(folder: Path) -> None:
    with ordinary(folder):
        (folder / "closed").mkdir()
        (folder / "closed/file").write_bytes(b"x" * 3 * MIB)
        (folder / "closed").chmod(0)
        with pytest.raises(PermissionError):
            os.listdir(folder / "closed")
        breach = DiskScratch(str(folder), 2 * MIB).check([])
    assert breach is not None
    assert breach.budget == "storage"
    assert breach.fatal


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_deleted_file_counts(folder: Path, how: str) -> None:
    with open(folder / "file", "w+b") as file:
        file.write(b"x" * 3 * MIB)
        file.flush()
        (folder / "file").unlink()
        assert os.listdir(folder) == []
        with mmap.mmap(file.fileno(), 3 * MIB):
            if how == "mapped":
                file.close()
            assert DiskScratch(str(folder), 2 * MIB).check([]) is None
            breach = DiskScratch(str(folder), 2 * MIB).check([os.getpid()])
    assert breach is not None
    assert "3 MiB" in breach.message


def test_a_tree_too_deep_to_look_at_is_a_breach(folder: Path) -> None:
    _nest(folder, 2500)
    breach = DiskScratch(str(folder), 64 * MIB).check([])
    assert breach is not None
    assert "too deeply" in breach.message


def test_a_folder_that_vanished_is_a_breach(folder: Path) -> None:
    scratch = DiskScratch(str(folder / "gone"), MIB)
    breach = scratch.check([])
    assert breach is not None
    assert "cannot be looked at" in breach.message


def test_looks_are_spaced(folder: Path) -> None:
    scratch = DiskScratch(str(folder), MIB)
    assert scratch.check([]) is None
    (folder / "file").write_bytes(b"x" * 2 * MIB)
    assert scratch.check([]) is None

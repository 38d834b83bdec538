"""The mount plan of one sandbox: what lies where inside, in which order, from which descriptors.

Rules kept here:

* Sources are opened once, without following links, and handed to bubblewrap as descriptors, so a name
  that is swapped afterwards changes nothing.
* Mounts are made parents first; a mount point is only ever created on a file system of the sandbox.
* No mask lies over a live host folder: a folder that holds the working folder (or another place of the
  sandbox's own) is mounted entry by entry instead.
* The root, /dev and every folder made for a mount point are read-only in the end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Literal

from ..ledger.events import escape
from ..manifest.plan import InputGrant, Plan
from .base import INNER_DIR, KERNEL_SOCKET_DIR, Bind, Mounted, SandboxError
from .inside import open_beneath, open_real

_SOCKETS_SIZE = 1 << 20
_MOST_ENTRIES = 400
_MOST_LINKS = 40
# Files and folders of procfs about the whole machine that root (soft uid) could read or write. They
# are covered where the kernel has them. The list follows what container runtimes mask.
_PROC_FILES = (
    "kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "mtrr",
    "pagetypeinfo", "sched_debug", "slabinfo", "timer_list", "timer_stats", "vmallocinfo",
)  # fmt: skip
_PROC_FOLDERS = ("acpi", "asound", "scsi")
# bubblewrap covers these only where access(2) says they are writable; the folder /proc/sys never is,
# and yet root's files in it are, capabilities or not (sysctl permissions go by uid).
_PROC_READ_ONLY = ("sys", "irq", "bus", "fs", "sysrq-trigger")
_RESERVED = ("/proc", "/dev", "/sys", INNER_DIR, KERNEL_SOCKET_DIR)

_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/run", "/sbin", "/usr", "/var")

Kind = Literal["bind", "tmpfs", "file", "link", "proc", "dev"]


class Node:
    """One name inside. `fd` of a bind, `size` and `mode` of a tmpfs, `content` of a file or link."""

    __slots__ = ("content", "fd", "kind", "mode", "size", "source", "target", "writable")

    def __init__(
        self,
        kind: Kind,
        target: str,
        *,
        fd: int = -1,
        source: str | None = None,
        size: int = 0,
        mode: int = 0o755,
        content: bytes = b"",
        writable: bool = False,
    ) -> None:
        self.kind = kind
        self.target = target
        self.fd = fd
        self.source = source
        self.size = size
        self.mode = mode
        self.content = content
        self.writable = writable


def _refuse(message: str, remedy: str = "") -> SandboxError:
    return SandboxError("validation", message, remedy)


def below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it (by name)."""
    return path == folder or folder == "/" or path.startswith(folder + "/")


def _above(path: str) -> list[str]:
    """The folders above an absolute path, from the top, without `/`."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[: n + 1]) for n in range(len(parts))]


class MountPlan:
    """Collects names, then gives bubblewrap's arguments. Owns every descriptor it opens.

    Attributes:
        fds: descriptors that the arguments name; bubblewrap must inherit them.
        mounted: every mount in mount order (after `arguments`).
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.mounted: tuple[Mounted, ...] = ()
        self._nodes: dict[str, Node] = {}
        self._own: dict[str, Node] = {}
        self._workdir = ""
        self._entries = 0

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        while self.fds:
            os.close(self.fds.pop())

    # -- the sandbox's own places ---------------------------------------------------------------

    def own_places(
        self, plan: Plan, *, home: str, tmp_size: int, shm_size: int, home_size: int, outputs_size: int
    ) -> None:
        """/proc, /dev and the writable places. Later ones take over the same name.

        Raises:
            SandboxError: `validation`: the working folder or HOME is not one that can be used.
        """
        for name, path in (("working folder", plan.workdir), ("home folder", home)):
            if not path.startswith("/") or os.path.normpath(path) != path or path == "/" or "\0" in path:
                raise _refuse(f"The {name} {escape(path)!r} is not a plain absolute folder name.")
            if path in _SYSTEM or any(below(path, place) or below(place, path) for place in _RESERVED):
                raise _refuse(
                    f"The {name} {escape(path)} is a place of the system.", "Move the notebook elsewhere."
                )
        self._workdir = plan.workdir
        own = [
            Node("proc", "/proc"),
            Node("dev", "/dev"),
            Node("tmpfs", "/dev/shm", size=shm_size, mode=0o1777, writable=True),  # noqa: S108
            Node("tmpfs", "/tmp", size=tmp_size, mode=0o1777, writable=True),  # noqa: S108
            Node("tmpfs", KERNEL_SOCKET_DIR, size=_SOCKETS_SIZE, mode=0o700, writable=True),
            Node("tmpfs", home, size=home_size, mode=0o700, writable=True),
        ]
        mode = 0o1777 if plan.workdir == "/tmp" else 0o755  # noqa: S108
        own.append(Node("tmpfs", plan.workdir, size=plan.scratch.size, mode=mode, writable=True))
        if plan.outputs is not None and plan.outputs.path != ".":
            target = os.path.normpath(os.path.join(plan.workdir, plan.outputs.path))
            if target == plan.workdir or not below(target, plan.workdir):
                raise _refuse(f"The outputs folder {escape(plan.outputs.path)} leaves the working folder.")
            own.append(Node("tmpfs", target, size=outputs_size, writable=True))
        for node in own:
            if node.kind == "tmpfs" and node.size < 1:
                raise _refuse(f"The size of {escape(node.target)} is {node.size} bytes.", "Give it a size.")
            self._own[node.target] = node
        self._nodes.update(self._own)

    def disk_scratch(self, folder: str) -> None:
        """Put a host folder, made for this sandbox alone, where the scratch tmpfs would be.

        Raises:
            SandboxError: `validation`: it is not an empty folder of ours.
        """
        fd = self._open(folder, "disk scratch")
        found = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or self._list(fd):
            raise _refuse(f"The disk scratch {escape(folder)} is not an empty folder of your own.")
        node = Node("bind", self._workdir, fd=fd, source=folder, writable=True)
        self._own[self._workdir] = self._nodes[self._workdir] = node

    # -- what is put there ----------------------------------------------------------------------

    def links(self, links: Iterable[tuple[str, str]]) -> None:
        """Symbolic links, as (target text, link name)."""
        for text, name in links:
            self._nodes.setdefault(name, Node("link", name, content=os.fsencode(text)))

    def files(self, files: dict[str, bytes], mode: int = 0o444) -> None:
        """Read-only files with the given content.

        Raises:
            SandboxError: `validation`: the name is taken.
        """
        for name, content in files.items():
            if name in self._nodes:
                raise _refuse(f"Two things would lie at {escape(name)} inside.")
            self._nodes[name] = Node("file", name, content=content, mode=mode)

    def binds(self, binds: Iterable[Bind]) -> None:
        """Host files and folders, read-only.

        Raises:
            SandboxError: `validation`: a source is not what was approved, or a name is taken.
        """
        for bind in binds:
            self._bind(self._open(bind.source, bind.target), bind.source, bind.target)

    def inputs(self, grants: Iterable[InputGrant]) -> None:
        """A plan's inputs, at the notebook's name and at the real one, after identity and digest are checked.

        Raises:
            SandboxError: `validation`: an input is missing, has changed, or does not match its digest.
        """
        for grant in grants:
            fd = self._open(grant.source, grant.path)
            self._check(fd, grant)
            self._bind(fd, grant.source, grant.path)
            if grant.source != grant.path:
                again = os.dup(fd)  # bubblewrap closes a descriptor once it is mounted
                self.fds.append(again)
                self._bind(again, grant.source, grant.source)

    def _check(self, fd: int, grant: InputGrant) -> None:
        found = os.fstat(fd)
        name = escape(grant.path)
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "file"
        known = grant.identity
        if kind != grant.kind or (
            known is not None and (known.device, known.inode) != (found.st_dev, found.st_ino)
        ):
            raise _refuse(
                f"The input {name} changed: it is not the {grant.kind} that was approved.",
                "Look at it, then start the notebook again.",
            )
        if grant.sha256 is None:
            return
        if kind != "file":
            raise _refuse(f"The input {name} is a folder and cannot have a sha256.", "Name its files.")
        import hashlib

        digest = hashlib.sha256()
        try:
            content = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _refuse(f"The input {name} cannot be read: {error.strerror}.") from error
        with open(content, "rb", buffering=0) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != grant.sha256:
            raise _refuse(
                f"The input {name} changed: its sha256 is {digest.hexdigest()}, not the {grant.sha256} of "
                "the manifest.",
                "Put the right file there, or correct and approve the manifest.",
            )

    def _open(self, source: str, wanted: str) -> int:
        if not source.startswith("/") or "\0" in source:
            raise _refuse(f"The source {escape(source)!r} of {escape(wanted)} is not an absolute name.")
        try:
            fd = open_real(source, os.O_PATH)
        except OSError as error:
            raise _refuse(
                f"{escape(source)} changed: it cannot be opened without links ({error.strerror}).",
                "Check that it exists, then start again.",
            ) from error
        self.fds.append(fd)
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise _refuse(
                f"{escape(source)} is neither a file nor a folder.",
                "Sockets, devices and pipes are never mounted.",
            )
        return fd

    def _list(self, fd: int) -> list[str]:
        opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            return sorted(os.listdir(opened))
        finally:
            os.close(opened)

    def _bind(self, fd: int, source: str, target: str) -> None:
        target = self._through_links(target)
        if any(below(target, place) for place in ("/proc", "/dev", INNER_DIR, KERNEL_SOCKET_DIR)):
            raise _refuse(f"{escape(target)} is a place of the sandbox's own and cannot be granted.")
        inner = [own for own in self._own if below(own, target)]
        if inner:
            self._split(fd, source, target)
            return
        known = self._nodes.get(target)
        if known is not None:
            if known.kind == "bind" and self._same(known.fd, fd):
                return
            raise _refuse(f"Two things would lie at {escape(target)} inside.", "Remove one of the grants.")
        self._nodes[target] = Node("bind", target, fd=fd, source=source)

    def _split(self, fd: int, source: str, target: str) -> None:
        """Mount a folder entry by entry, so that none of it has to be masked by what lies in it."""
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise _refuse(f"{escape(target)} is a file, and a folder of the sandbox's own.")
        try:
            names = self._list(fd)
        except OSError as error:
            raise _refuse(f"The folder {escape(source)} cannot be listed: {error.strerror}.") from error
        self._entries += len(names)
        if self._entries > _MOST_ENTRIES:
            raise _refuse(
                f"The folder {escape(source)} has too many entries to be read-only in a writable place "
                f"(more than {_MOST_ENTRIES}).",
                "Grant the files or subfolders that the notebook reads.",
            )
        for name in names:
            child = f"{target.rstrip('/')}/{name}"
            if child in self._own and child != self._workdir:
                continue  # HOME, outputs, …: empty inside, whatever the host has there
            opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            self.fds.append(opened)
            mode = os.fstat(opened).st_mode
            if stat.S_ISLNK(mode):
                self._nodes.setdefault(child, Node("link", child, content=os.readlink(b"", dir_fd=opened)))
            elif (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and (
                child not in self._nodes or child in self._own
            ):
                self._bind(opened, f"{source.rstrip('/')}/{name}", child)

    def _through_links(self, target: str) -> str:
        """The name that `target` leads to, given the links made inside."""
        if os.path.normpath(target) != target or not target.startswith("/") or "\0" in target:
            raise _refuse(f"{escape(target)!r} is not a plain absolute name.")
        for _ in range(_MOST_LINKS):
            for above in _above(target):
                node = self._nodes.get(above)
                if node is not None and node.kind == "link":
                    text = os.fsdecode(node.content)
                    place = os.path.normpath(os.path.join(os.path.dirname(above), text))
                    target = os.path.normpath(place + target[len(above) :])
                    break
            else:
                return target
        raise _refuse(f"{escape(target)} leads through too many links.")

    @staticmethod
    def _same(one: int, other: int) -> bool:
        return os.path.sameopenfile(one, other)

    # -- what bubblewrap is told ----------------------------------------------------------------

    def arguments(self, *, root: bool) -> list[bytes]:
        """bubblewrap's arguments for every mount, parents first.

        Args:
            root: started by root, whose identity outside reaches further into /proc.

        Raises:
            SandboxError: `validation`: a mount point would have to be made on the host.
        """
        out: list[bytes] = [b"--perms", b"0755", b"--dir", b"/"]
        mounted = [Mounted(target="/", writable=False)]
        made: set[str] = set()
        for target in sorted(self._nodes, key=lambda name: name.split("/")):
            node = self._nodes[target]
            ground = self._ground(target)
            if ground is not None and ground.kind == "bind" and not ground.writable:
                if not self._fits(ground, node):
                    continue
            else:
                floor = ground.target if ground is not None else "/"
                for folder in _above(target):
                    if folder not in made and folder not in self._nodes and below(folder, floor):
                        if folder != floor:
                            out += [b"--perms", b"0755", b"--dir", os.fsencode(folder)]
                        made.add(folder)
            out += self._emit(node, on_root=ground is None)
            if node.kind not in ("file", "link"):
                mounted.append(Mounted(target=target, writable=node.writable, source=node.source))
        out += _cover_proc(root)
        out += [b"--remount-ro", b"/dev", b"--remount-ro", b"/"]
        self.mounted = tuple(mounted)
        return out

    def _ground(self, target: str) -> Node | None:
        """The mount on which `target` lies; None for the sandbox's root."""
        for above in reversed(_above(target)):
            node = self._nodes.get(above)
            if node is not None and node.kind not in ("file", "link"):
                return node
            if node is not None:
                raise _refuse(f"{escape(target)} would lie below {escape(above)}, which is not a folder.")
        return None

    def _fits(self, ground: Node, node: Node) -> bool:
        """Whether `node` must be mounted on a host folder: False when the folder shows the same already."""
        relative = node.target[len(ground.target.rstrip("/")) + 1 :]
        try:
            fd = open_beneath(ground.fd, relative, os.O_PATH)
        except OSError as error:
            if node.kind == "link" and error.errno == 40:  # ELOOP: a link is there, and it is read-only
                return False
            raise _refuse(
                f"{escape(node.target)} cannot be mounted: {escape(ground.target)} is a folder of the host "
                f"and has no such name ({error.strerror}).",
                "Create it there first, or do not grant the folder around it.",
            ) from error
        try:
            if node.kind == "link" or (node.kind == "bind" and self._same(fd, node.fd)):
                return False
            folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            wanted = stat.S_ISDIR(os.fstat(node.fd).st_mode) if node.kind == "bind" else node.kind == "tmpfs"
            if folder != wanted:
                raise _refuse(
                    f"{escape(node.target)} cannot be mounted: the host has something of another kind there."
                )
            return True
        finally:
            os.close(fd)

    def _emit(self, node: Node, *, on_root: bool) -> list[bytes]:
        target = os.fsencode(node.target)
        perms = [b"--perms", b"%04o" % node.mode]
        if node.kind == "bind":
            # bubblewrap mounts by name, then compares what it mounted with the descriptor.
            option = b"--bind-fd" if node.writable else b"--ro-bind-fd"
            return [option, b"%d" % node.fd, target]
        if node.kind == "tmpfs":
            return [*perms, b"--size", b"%d" % node.size, b"--tmpfs", target]
        if node.kind == "link":
            return [b"--symlink", node.content, target]
        if node.kind == "file":
            fd = memory_file(node.content)
            self.fds.append(fd)
            # The root becomes read-only, so a copy there is enough; elsewhere it takes a mount.
            return [*perms, b"--file" if on_root else b"--ro-bind-data", b"%d" % fd, target]
        return [b"--" + node.kind.encode(), target]


def memory_file(content: bytes) -> int:
    """A descriptor, at its start, of a file in memory with this content (memfd_create(2))."""
    fd = os.memfd_create("glovebox", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _cover_proc(root: bool) -> list[bytes]:
    out: list[bytes] = []
    for name in _PROC_READ_ONLY:
        if os.path.lexists(f"/proc/{name}"):
            path = b"/proc/" + name.encode()
            out += [b"--ro-bind", path, path]
    if not root:
        return out
    for name in _PROC_FILES:
        if os.path.lexists(f"/proc/{name}"):
            out += [b"--ro-bind", b"/dev/null", b"/proc/" + name.encode()]
    for name in _PROC_FOLDERS:
        if os.path.lexists(f"/proc/{name}"):
            path = b"/proc/" + name.encode()
            out += [b"--size", b"4096", b"--tmpfs", path, b"--remount-ro", path]
    return out

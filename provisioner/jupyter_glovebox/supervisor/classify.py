"""What a watched call means for the plan: let it pass, or answer it; and whether it is an event.

Paths are evidence, never authority: they can change between our look and the kernel's. Whatever is
decided here, the mount namespace decides what the program gets; a lost race can only mislabel an event.

A path that exists nowhere is no event, and stays ENOENT, so that import and configuration probes work.
"""

from __future__ import annotations

import errno
import os
import posixpath
import socket
import struct
from typing import NamedTuple

from ..ledger.events import EventClass, escape
from ..manifest.plan import Plan
from ..sandbox.base import Mounted
from ..sandbox.inside import open_following, open_inside
from ..sandbox.sensitive import is_sensitive, is_sensitive_address

# Names that programs look for on every machine. Hidden ones stay ENOENT without an event, unless they
# are sensitive: a configuration that is not there is not something that a person was denied.
_QUIET = (
    "/etc/", "/proc/", "/sys/", "/dev/", "/run/", "/var/run/", "/var/cache/", "/var/lib/", "/boot/", "/usr/",
    "/lib/", "/lib64/", "/bin/", "/sbin/",
)  # fmt: skip
_MOST_LINKS = 40  # path_resolution(7)


class Finding(NamedTuple):
    """An event to be.

    Attributes:
        event_class, operation, target: as in Event; target escaped.
        error: errno the program gets; None when the kernel answers by itself.
        told: name of the errno for the event.
        rule, suggestion: as in Event.
        sensitive: credential store or metadata address.
    """

    event_class: EventClass
    operation: str
    target: str
    error: int | None
    told: str
    rule: str
    suggestion: str
    sensitive: bool = False


class Classifier:
    """Knows the plan, the sandbox's mounts, and the host's names.

    Args:
        plan: the plan.
        mounts: the sandbox's mounts in order.
        root_fd: O_PATH descriptor of the sandbox's root.
        homes: the user's home folders, for sensitive names.
    """

    def __init__(self, plan: Plan, mounts: tuple[Mounted, ...], root_fd: int, homes: tuple[str, ...]) -> None:
        self._plan = plan
        self._root_fd = root_fd
        self._homes = homes
        self._mounts = {mount.target: mount for mount in mounts}
        self._workdir = plan.workdir
        self._inputs = frozenset(name for grant in plan.inputs for name in (grant.path, grant.source))
        self._dot_homes = tuple(f"{home.rstrip('/')}/." for home in homes)

    def readable(self) -> tuple[bytes, ...]:
        """Beginnings of names in read-only mounts of the installation: reading there is never an event.

        Inputs are left out: people keep links in them that lead to folders which were not granted.
        """
        return tuple(
            os.fsencode(target) + b"/"
            for target, mount in self._mounts.items()
            if self._installed(mount) and os.path.isdir(mount.source or "")
        )

    def _installed(self, mount: Mounted) -> bool:
        return mount.source is not None and not mount.writable and mount.target not in self._inputs

    # -- paths ----------------------------------------------------------------------------------

    def mount_of(self, path: str) -> Mounted | None:
        """The mount a normalised absolute path lies on; None for the sandbox's own root."""
        mounts = self._mounts
        while path != "/":
            found = mounts.get(path)
            if found is not None:
                return found
            path = path.rpartition("/")[0] or "/"
        return None

    def path(
        self, operation: str, path: str, *, writes: bool, creates: bool, follows: bool = True
    ) -> Finding | None:
        """Judge one path.

        Args:
            operation: `open`, `exec`, `create`, `delete`, …
            path: absolute, normalised, as the program means it.
            writes: the call changes something.
            creates: the call makes a name that may not exist yet.
            follows: the call follows a link that the path itself names.
        """
        path = _without_proc_root(path)
        mount = self.mount_of(path)
        if mount is not None and mount.source is not None and not mount.writable:
            if writes:
                return self._read_only(operation, path, creates)
            if self._installed(mount):
                return None
        if mount is not None and not mount.writable and path.startswith(("/proc/", "/dev/")):
            return None
        path, exists = self._lead(path, follows)
        if exists:
            return None
        if creates and (mount := self.mount_of(path)) is not None and self._inside(posixpath.dirname(path)):
            return None if mount.writable else self._read_only(operation, path, creates)
        return self._hidden(operation, path, creates)

    def _lead(self, path: str, follows: bool = True) -> tuple[str, bool]:
        """Where a name leads inside, and whether something is there."""
        try:
            os.close(open_inside(self._root_fd, path, os.O_PATH | (0 if follows else os.O_NOFOLLOW)))
        except OSError as error:
            if error.errno != errno.ELOOP:
                return path, False
        except ValueError:
            return path, False
        else:
            return path, True
        if follows:
            try:
                os.close(open_following(self._root_fd, path, os.O_PATH))
            except OSError:
                pass
            else:
                return path, True
        path = self._target(path, follows)
        return path, self._inside(path, follows)

    def _target(self, path: str, follows: bool) -> str:
        """The name that is left when every link on the way inside is replaced by what it says."""
        done, todo, links = "", [part for part in path.split("/") if part], 0
        while todo:
            part = todo.pop(0)
            if part in (".", ".."):
                done = posixpath.dirname(done) if part == ".." else done
                continue
            name = f"{done.rstrip('/')}/{part}"
            text = self._link(name) if todo or follows else None
            if text is None:
                done = name
                continue
            links += 1
            if links > _MOST_LINKS:
                return path
            done = "" if text.startswith("/") else done
            todo = [part for part in text.split("/") if part] + todo
        return done or "/"

    def _link(self, path: str) -> str | None:
        """What a link inside says; None for anything else."""
        try:
            fd = open_inside(self._root_fd, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            return os.readlink("", dir_fd=fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _inside(self, path: str, follows: bool = True) -> bool:
        try:
            os.close(open_inside(self._root_fd, path, os.O_PATH | (0 if follows else os.O_NOFOLLOW)))
        except OSError as error:
            # A link on the way: the kernel will follow it inside, and decide there.
            return error.errno == errno.ELOOP
        return True

    def _read_only(self, operation: str, path: str, creates: bool) -> Finding | None:
        exists = self._inside(path)
        if operation in ("create", "symlink") and exists:
            return None  # EEXIST, not a matter of rights
        if not exists and not (creates and self._inside(posixpath.dirname(path))):
            return None
        return Finding(
            "read-only", operation, escape(path), None, "EROFS", "inputs are read-only",
            f"Write to the working folder or to {self._outputs()} instead.",
        )  # fmt: skip

    def _outputs(self) -> str:
        outputs = self._plan.outputs
        return "an outputs folder" if outputs is None else f"{outputs.path}/"

    def _hidden(self, operation: str, path: str, creates: bool) -> Finding | None:
        sensitive = is_sensitive(path, self._homes)
        if not sensitive and (
            f"{path}/".startswith(_QUIET) or path.startswith(self._dot_homes) or path == "/"
        ):
            return None
        judged = posixpath.dirname(path) if creates else path
        if self._plan.denials == "uniform":
            if self.mount_of(path) is not None and not sensitive:
                return None
            exists = True
        else:
            exists = os.path.lexists(judged)
        if not exists and not sensitive:
            return None
        return Finding(
            "not-granted", operation, escape(path), errno.EACCES if exists else None,
            "EACCES" if exists else "ENOENT", "inputs", self._suggestion(path, sensitive, creates), sensitive,
        )  # fmt: skip

    def _suggestion(self, path: str, sensitive: bool, creates: bool) -> str:
        if sensitive:
            return "No manifest can allow this: credential locations are never mounted."
        import json

        inside = path.startswith(self._workdir.rstrip("/") + "/")
        if inside:
            path = path[len(self._workdir.rstrip("/")) + 1 :]
        if creates and inside and self._plan.outputs is None and "/" in path:
            return f"outputs: {{path: {json.dumps(escape(posixpath.dirname(path)), ensure_ascii=False)}}}"
        if creates:
            return f"Write to the working folder or to {self._outputs()} instead."
        return f"inputs: [{json.dumps(escape(path), ensure_ascii=False)}]"

    # -- addresses ------------------------------------------------------------------------------

    def address(self, raw: bytes) -> Finding | None:
        """Judge a socket address (struct sockaddr) of connect or sendto."""
        if len(raw) < 2:
            return None
        (family,) = struct.unpack_from("=H", raw)
        if family == socket.AF_UNIX:
            return self._unix(raw[2:])
        if family == socket.AF_INET and len(raw) >= 8:
            host, port = socket.inet_ntop(socket.AF_INET, raw[4:8]), int.from_bytes(raw[2:4], "big")
            local = host.startswith("127.") or host == "0.0.0.0"  # noqa: S104 - compared, not bound
        elif family == socket.AF_INET6 and len(raw) >= 24:
            host, port = socket.inet_ntop(socket.AF_INET6, raw[8:24]), int.from_bytes(raw[2:4], "big")
            local = host in ("::1", "::") or host.startswith("::ffff:127.")
        else:
            return None
        if local or port == 0:
            # Port 0: getaddrinfo(3) asks the kernel for a source address; nothing is sent.
            return None
        return self._network("connect", f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                             is_sensitive_address(host, port))  # fmt: skip

    def lookup(self, name: str) -> Finding:
        """A name that a program tried to look up."""
        return self._network("lookup", escape(name), is_sensitive_address(name, 53))

    def _network(self, operation: str, target: str, sensitive: bool) -> Finding:
        lookup = operation == "lookup"
        return Finding(
            "network", operation, target, None if lookup else errno.EACCES, "EAI_AGAIN" if lookup else "EACCES",
            "network",
            "No manifest can allow this: metadata addresses are never reachable." if sensitive
            else "This version grants no network; a notebook must get its data from `inputs`.",
            sensitive,
        )  # fmt: skip

    def _unix(self, raw: bytes) -> Finding | None:
        name = raw.split(b"\0")[0]
        if not name.startswith(b"/"):
            return None  # abstract or relative: there is only what the sandbox itself has
        path, exists = self._lead(_without_proc_root(posixpath.normpath(os.fsdecode(name))))
        if exists:
            return None
        if self._plan.denials == "uniform":
            hidden = self.mount_of(path) is None and not f"{path}/".startswith(_QUIET)
        else:
            hidden = os.path.lexists(path)
        return self.foreign_socket(path) if hidden or is_sensitive(path, self._homes) else None

    def foreign_socket(self, path: str) -> Finding:
        """A connect to a socket that is not the sandbox's own."""
        return Finding(
            "not-granted", "connect", escape(path), errno.EACCES, "EACCES", "sockets",
            "No manifest can allow this: sockets of the host are never connected.",
            is_sensitive(path, self._homes),
        )  # fmt: skip


def _without_proc_root(path: str) -> str:
    """`/proc/self/root/x` is another name of `/x`."""
    while path.startswith("/proc/"):
        parts = path.split("/")
        at = 5 if parts[3:4] == ["task"] else 3
        if parts[at : at + 1] != ["root"]:
            break
        path = "/" + "/".join(parts[at + 1 :])
    return path


def dns_question(packet: bytes) -> str | None:
    """The name asked for in a DNS query (RFC 1035, section 4.1), None for anything else."""
    if len(packet) < 17 or packet[2] & 0x80 or packet[4:6] != b"\0\1":
        return None
    labels: list[bytes] = []
    at = 12
    while at < len(packet) and (length := packet[at]):
        if length > 63 or at + length >= len(packet) or len(labels) > 127:
            return None
        labels.append(packet[at + 1 : at + 1 + length])
        at += 1 + length
    return escape(b".".join(labels)) if labels else None

"""The part of the file system that every sandbox has: system folders, and an /etc made for it.

Nothing of the host's /etc is visible but what is listed here, and each entry only when everybody on the
host may read it: a sandbox that root started runs as the owner of root's files.

Sources: hier(7), passwd(5), nsswitch.conf(5), resolv.conf(5), hosts(5), tzfile(5).
"""

from __future__ import annotations

import glob
import os
import stat

from .base import Bind, SandboxError

_SYSTEM_NAMES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# os.cpu_count, psutil, OpenBLAS and torch read the shape of the processor here.
_CPU = "/sys/devices/system/cpu"

# Names or glob patterns. Never shadow, ssh, sudoers, keytabs, machine-id, hosts, or a folder of keys.
_BOUND = (
    "alternatives", "ca-certificates/extracted", "crypto-policies", "fonts", "java-*-openjdk", "ld.so.cache",
    "ld.so.conf.d", "OpenCL", "pki/ca-trust/extracted", "pki/tls/cert.pem", "pki/tls/certs", "python[23]*",
    "ssl/cert.pem", "ssl/certs", "terminfo", "texmf",
)  # fmt: skip
# Small files; a copy is cheaper than a mount.
_COPIED = (
    "debian_version", "default/locale", "host.conf", "inputrc", "ld.so.conf", "locale.alias", "locale.conf",
    "lsb-release", "magic", "magic.mime", "matplotlibrc", "mime.types", "odbcinst.ini", "os-release",
    "pki/tls/openssl.cnf", "protocols", "redhat-release", "R/Makeconf", "R/Renviron", "R/Rprofile.site",
    "R/javaconf", "R/ldpaths", "R/repositories", "services", "ssl/openssl.cnf", "system-release",
)  # fmt: skip
_LARGEST_COPY = 1 << 18
# Where a link out of /etc may lead.
_REAL_HOMES_OF_ETC = ("/etc/", "/usr/", "/var/lib/ca-certificates/", "/nix/store/", "/gnu/store/")
_MOST_ENTRIES = 4000


def system_binds() -> tuple[tuple[Bind, ...], tuple[tuple[str, str], ...]]:
    """The system's folders: `/usr`, what belongs to it in `/`, and the processors' description.

    Returns:
        Binds (read-only), and links as (target text, link name) where `/bin`, `/lib`, … are links.
    """
    binds = [Bind(source=os.path.realpath("/usr"), target="/usr")]
    links = []
    for name in _SYSTEM_NAMES:
        if os.path.islink(name):
            links.append((os.readlink(name), name))
        elif os.path.isdir(name):
            binds.append(Bind(source=name, target=name))
    if os.path.isdir(_CPU):
        binds.append(Bind(source=_CPU, target=_CPU))
    return tuple(binds), tuple(links)


def in_system(path: str) -> bool:
    """Whether an absolute name lies in what `system_binds` gives (`/usr/bin/python3`, `/bin/sh`)."""
    return any(path == name or path.startswith(name + "/") for name in ("/usr", *_SYSTEM_NAMES))


def system_path() -> tuple[str, ...]:
    """The system's folders for PATH, those that exist."""
    usual = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    return tuple(name for name in usual if os.path.isdir(name))


def etc_files(user: str, uid: int, gid: int, home: str, hostname: str) -> dict[str, bytes]:
    """The files of /etc that are made for the sandbox or copied from the host, absolute name to content.

    Args:
        user: the name that `getpass.getuser()` and `pwd.getpwuid(uid)` give inside.
        uid, gid: the ids inside.
        home: absolute name of the home folder.
        hostname: the sandbox's host name.

    Raises:
        SandboxError: `validation`, when a name cannot stand in passwd(5) or hosts(5).
    """
    for what, text in (("user name", user), ("home folder", home), ("host name", hostname)):
        if not text or any(char in text for char in ":\n\0"):
            raise SandboxError(
                "validation",
                f"The {what} {text!r} cannot stand in the sandbox's /etc.",
                "Start the server from an account whose names hold no colon and no line break.",
            )
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    passwd = [f"{user}:x:{uid}:{gid}:{user}:{home}:{shell}"]
    group = [f"{user}:x:{gid}:"]
    if user != "root":
        passwd.append("root:x:0:0:root:/nonexistent:/usr/sbin/nologin")
        group.append("root:x:0:")
    passwd.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
    group += ["tty:x:5:", "nogroup:x:65534:"]
    made = {
        "passwd": "\n".join(passwd),
        "group": "\n".join(group),
        "hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost ip6-loopback",
        "hostname": hostname,
        # `dns` stays: a lookup is then an attempt that can be seen, and the gateway's resolver can answer it.
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
        "protocols: files\nservices: files\nethers: files\nrpc: files",
        "resolv.conf": "# No name server: this sandbox has no network.\noptions timeout:1 attempts:1",
        "shells": "/bin/sh\n/bin/bash",
    }
    if zone := _time_zone():
        made["timezone"] = zone
    files = {f"/etc/{name}": f"{text}\n".encode() for name, text in made.items()}
    for name in _COPIED:
        if (content := _copy(f"/etc/{name}")) is not None:
            files[f"/etc/{name}"] = content
    return files


def etc_binds() -> tuple[Bind, ...]:
    """The host's harmless larger /etc entries, each by its real path, parents before children.

    An entry that others may not read, or a folder that holds such a file, is left out.
    """
    found: dict[str, str] = {}
    for pattern in _BOUND:
        full = f"/etc/{pattern}"
        for name in sorted(glob.glob(full)) if "*" in pattern else (full,):
            source = os.path.realpath(name)
            if source.startswith(_REAL_HOMES_OF_ETC) and _public(source):
                found[name] = source
    if "/etc/ssl/certs" not in found:  # one private file there must not cost the certificates
        for name in ("/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/certs/ca-bundle.crt"):
            source = os.path.realpath(name)
            if source.startswith(_REAL_HOMES_OF_ETC) and _public(source):
                found[name] = source
    zone = os.path.realpath("/etc/localtime")
    if _is_time_zone(zone):
        found["/etc/localtime"] = zone
    return tuple(Bind(source=source, target=name) for name, source in sorted(found.items()))


def _copy(name: str) -> bytes | None:
    """The content of a small file of /etc that everybody may read; None when there is no such file."""
    source = os.path.realpath(name)
    try:
        with open(source, "rb") as file:
            found = os.fstat(file.fileno())
            if (
                source.startswith(_REAL_HOMES_OF_ETC)
                and _public_file(found)
                and found.st_size <= _LARGEST_COPY
            ):
                return file.read(_LARGEST_COPY)
    except OSError:
        pass
    return None


def _public(path: str) -> bool:
    """Whether it is a file or folder that everybody may read, to the last file, and small."""
    try:
        if os.path.isfile(path):
            return _public_file(os.stat(path))
        if not os.path.isdir(path):
            return False
        left = _MOST_ENTRIES
        stack = [path]
        while stack:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0 or entry.name.endswith((".key", ".keytab", ".p12", ".pfx")):
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    elif not entry.is_symlink() and not _public_file(entry.stat()):
                        return False
    except OSError:
        return False
    return True


def _public_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and bool(found.st_mode & stat.S_IROTH)


def _is_time_zone(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return os.path.isfile(path) and file.read(4) == b"TZif"
    except OSError:
        return False


def _time_zone() -> str:
    """The host's time zone by name (`Europe/Zurich`), empty when it has none."""
    _, found, name = os.path.realpath("/etc/localtime").partition("/zoneinfo/")
    return name if found and _is_time_zone("/etc/localtime") else ""

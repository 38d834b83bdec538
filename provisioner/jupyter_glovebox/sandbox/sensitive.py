"""Places that hold secrets or reach out of any sandbox: never mounted, and an attempt on them is severe.

The lists name credential stores, keys, histories, browser profiles, sockets of container engines and
cloud metadata services, by their default places. Sources: the documentation of each named program;
Amazon EC2 "Instance metadata", Google Compute Engine "VM metadata", Azure "IMDS" and "What is IP address
168.63.129.16", Alibaba Cloud ECS "Instance metadata", Oracle Cloud "Getting instance metadata".
"""

from __future__ import annotations

import os
import socket

_KEYS = "private keys"
_CLOUD = "cloud credentials"
_TOKENS = "access tokens"
_PASSWORDS = "stored passwords"
_BROWSER = "a browser profile"
_HISTORY = "a command history"
_MAIL = "a mail account"
_WALLET = "a wallet"
_SESSION = "a key to a running session"
_JUPYTER = "Jupyter's settings and keys"
_OURS = "this program's own state"

_IN_HOME: dict[str, str] = {
    **dict.fromkeys((".ssh", ".ssh2", ".gnupg", ".pki", ".age", ".config/sops", ".globus", ".tsh"), _KEYS),
    **dict.fromkeys(
        (".aws", ".azure", ".config/gcloud", ".kube", ".oci", ".s3cfg", ".boto", ".config/rclone",
         ".config/openstack", ".config/doctl", ".config/helm", ".bluemix", ".fly", ".config/heroku",
         ".terraformrc", ".terraform.d/credentials.tfrc.json", ".config/azure", ".aliyun", ".ibmcloud",
         ".snowsql", ".snowflake", ".config/snowflake", ".databrickscfg", ".dbt/profiles.yml"), _CLOUD),
    **dict.fromkeys(
        (".netrc", "_netrc", ".authinfo", ".authinfo.gpg", ".git-credentials", ".config/git/credentials",
         ".config/gh", ".config/hub", ".config/glab-cli", ".docker", ".config/containers/auth.json",
         ".pypirc", ".npmrc", ".yarnrc.yml", ".cargo/credentials", ".cargo/credentials.toml",
         ".gem/credentials", ".m2/settings.xml", ".m2/settings-security.xml", ".gradle/gradle.properties",
         ".composer/auth.json", ".config/composer/auth.json", ".nuget/NuGet", ".config/NuGet", ".condarc",
         ".continuum", ".config/binstar", ".anaconda/keyring", ".kaggle", ".huggingface",
         ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".config/wandb", ".openai",
         ".config/openai", ".config/anthropic", ".claude", ".claude.json", ".codex",
         ".config/github-copilot", ".cursor", ".config/Cursor", ".config/Code", ".vscode-server/data",
         ".vault-token", ".julia/servers", ".Renviron"), _TOKENS),
    **dict.fromkeys(
        (".password-store", ".local/share/password-store", ".local/share/keyrings", ".gnome2/keyrings",
         ".local/share/kwalletd", ".kde/share/apps/kwallet", ".config/keepassxc", ".config/Bitwarden",
         ".config/Bitwarden CLI", ".config/op", ".config/1Password", ".pgpass", ".my.cnf", ".mylogin.cnf",
         ".odbc.ini", ".cassandra", ".local/share/python_keyring", ".smbcredentials"), _PASSWORDS),
    **dict.fromkeys(
        (".mozilla", ".cache/mozilla", ".config/google-chrome", ".config/chromium",
         ".config/BraveSoftware", ".config/microsoft-edge", ".config/opera", ".config/vivaldi",
         ".config/mozilla", "snap/firefox", "snap/chromium", ".var/app/org.mozilla.firefox",
         ".var/app/com.google.Chrome", ".var/app/org.chromium.Chromium"), _BROWSER),
    **dict.fromkeys(
        (".bash_history", ".zsh_history", ".histfile", ".sh_history", ".local/share/fish/fish_history",
         ".python_history", ".ipython/profile_default/history.sqlite", ".psql_history", ".mysql_history",
         ".sqlite_history", ".node_repl_history", ".rediscli_history", ".Rhistory", ".lesshst", ".viminfo",
         ".julia/logs"), _HISTORY),
    **dict.fromkeys((".thunderbird", ".msmtprc", ".fetchmailrc", ".config/evolution", ".mutt",
                     ".config/neomutt", ".muttrc"), _MAIL),
    **dict.fromkeys((".bitcoin", ".ethereum", ".electrum", ".config/solana"), _WALLET),
    **dict.fromkeys((".Xauthority", ".ICEauthority", ".dbus", ".config/pulse/cookie",
                     ".local/share/containers"), _SESSION),
    **dict.fromkeys((".jupyter", ".local/share/jupyter/runtime", ".local/share/jupyter/notebook_secret",
                     ".local/share/jupyter/nbsignatures.db", ".ipython/profile_default/security"), _JUPYTER),
    **dict.fromkeys((".config/jupyter-glovebox", ".local/state/jupyter-glovebox"), _OURS),
}  # fmt: skip

_ENGINE = "a container engine"
_SYSTEM: dict[str, str] = {
    **dict.fromkeys(("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/security/opasswd"),
                    "password hashes"),
    **dict.fromkeys(("/etc/ssh", "/etc/ssl/private", "/etc/pki/tls/private", "/etc/letsencrypt",
                     "/etc/krb5.keytab", "/etc/wireguard", "/etc/ipsec.secrets", "/etc/openvpn"), _KEYS),
    **dict.fromkeys(("/etc/sudoers", "/etc/sudoers.d", "/etc/kubernetes", "/etc/rancher",
                     "/etc/jupyterhub", "/srv/jupyterhub", "/etc/NetworkManager/system-connections",
                     "/etc/jupyter-glovebox", "/etc/odbc.ini", "/etc/boto.cfg"),
                    "the administrator's secrets"),
    **dict.fromkeys(("/run/secrets", "/var/run/secrets", "/run/credentials"), "mounted secrets"),
    **dict.fromkeys(
        ("/run/docker.sock", "/run/docker", "/run/containerd", "/run/podman", "/run/crio",
         "/run/snapd.socket", "/run/libvirt", "/run/lxd", "/run/buildkit", "/var/lib/docker",
         "/var/lib/containerd", "/var/lib/containers", "/var/lib/kubelet", "/var/lib/libvirt",
         "/var/lib/lxd", "/var/snap/lxd", "/run/k3s", "/run/cri-dockerd.sock"), _ENGINE),
    **dict.fromkeys(("/run/dbus", "/run/systemd/private", "/run/user", "/tmp/.X11-unix"), _SESSION),  # noqa: S108
    **dict.fromkeys(("/dev/mem", "/dev/kmem", "/dev/kvm", "/proc/kcore", "/dev/port"), "the machine's memory"),
}  # fmt: skip
_DEEPEST = 4  # parts of the longest entry of _IN_HOME
_SYSTEM_DEEPEST = 4

_KEY_FILES = frozenset(
    ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", ".git-credentials",
     ".netrc", ".pgpass", ".vault-token", "docker.sock", "containerd.sock", "podman.sock")
)  # fmt: skip

_ADDRESSES = frozenset(
    ("fd00:ec2::254", "fd00:ec2::23", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd20:ce::254")
)
_HOSTS = frozenset(
    ("metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal",
     "metadata.tencentyun.com", "metadata.azure.internal", "host.docker.internal",
     "kubernetes.default.svc")
)  # fmt: skip
# Docker's plain and TLS ports, the kubelet.
_PORTS = frozenset((2375, 2376, 10250))


def all_homes() -> tuple[str, ...]:
    """Every home folder of this machine, by name and by real path: `$HOME`, passwd(5), /home/*, /root."""
    import pwd

    homes = {os.path.expanduser("~"), "/root"}
    # System accounts have /, /bin, /usr/sbin, /nonexistent or a service's folder as home.
    homes.update(e.pw_dir for e in pwd.getpwall() if e.pw_uid >= 1000 and e.pw_uid != 65534)
    try:
        homes.update(f"/home/{name}" for name in os.listdir("/home"))
    except OSError:
        pass
    homes.update([os.path.realpath(home) for home in homes])
    return tuple(
        sorted(home for home in homes if home.startswith("/") and home.count("/") >= 1 and home != "/")
    )


def sensitive(path: str, homes: tuple[str, ...] | None = None) -> str | None:
    """Why an absolute, normalised path is sensitive: `private keys`, `a browser profile`, …; None if it is not.

    Args:
        path: the name as used, or a real path; check both when both are known.
        homes: home folders; None asks `all_homes`.
    """
    if path.startswith("/var/run/") or path == "/var/run":
        path = path[4:]
    parts = path.split("/")
    if parts[-1] in _KEY_FILES:
        return _TOKENS if parts[-1].startswith(".") else _ENGINE if parts[-1].endswith("sock") else _KEYS
    for depth in range(2, min(len(parts), _SYSTEM_DEEPEST + 1) + 1):
        if reason := _SYSTEM.get("/".join(parts[:depth])):
            return reason
    if path.startswith("/tmp/") and (parts[2].startswith(("krb5cc", "ssh-", "glovebox-"))):  # noqa: S108
        return _SESSION
    for home in all_homes() if homes is None else homes:
        if not path.startswith(home) or path[len(home) : len(home) + 1] != "/":
            continue
        if reason := _below_home(path[len(home) + 1 :]):
            return reason
    if path.startswith("/home/") and len(parts) > 3:
        return _below_home("/".join(parts[3:]))
    if path.startswith("/root/"):
        return _below_home(path[6:])
    return None


def is_key_file(name: str) -> bool:
    """Whether a bare file name is that of a key or token wherever it lies (`id_rsa`, `.netrc`)."""
    return name in _KEY_FILES


def _below_home(relative: str) -> str | None:
    parts = relative.split("/")
    for depth in range(1, min(len(parts), _DEEPEST) + 1):
        if reason := _IN_HOME.get("/".join(parts[:depth])):
            return reason
    return None


def is_sensitive(path: str, homes: tuple[str, ...]) -> bool:
    """Whether an absolute, normalised path is a credential store or the like. Fast: no system call."""
    return sensitive(path, homes) is not None


def sensitive_places(homes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every listed place as (absolute path, reason), for finding folders that contain one."""
    found = list(_SYSTEM.items())
    found += [(f"{home}/{name}", reason) for home in homes for name, reason in _IN_HOME.items()]
    return found


def is_sensitive_address(host: str, port: int) -> bool:
    """Whether an address or host name is a cloud metadata service, link-local, or a control port.

    Args:
        host: a host name, or an IPv4 or IPv6 address in any form that inet_aton(3) or inet_pton(3) takes.
        port: TCP or UDP port; 0 when unknown.
    """
    if port in _PORTS:
        return True
    host = host.lower().strip("[]").rstrip(".").partition("%")[0]
    if host in _HOSTS:
        return True
    try:
        host = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, host))
        host = host.removeprefix("::ffff:")
    except (OSError, ValueError):
        try:
            host = socket.inet_ntoa(socket.inet_aton(host))
        except (OSError, ValueError, UnicodeError):
            return False
    return host in _ADDRESSES or host.startswith("169.254.")

"""The list of places and addresses that are sensitive."""

from __future__ import annotations

from pathlib import Path

import pytest
from jupyter_glovebox.sandbox.sensitive import (
    all_homes,
    is_sensitive,
    is_sensitive_address,
    sensitive,
    sensitive_places,
)

HOMES = ("/data/people/ada",)


@pytest.mark.parametrize(
    "path",
    ["/data/people/ada/.ssh", "/data/people/ada/.ssh/id_rsa", "/data/people/ada/.config/gcloud/creds.db",
     "/home/other/.aws/credentials", "/root/.netrc", "/run/docker.sock", "/var/run/docker.sock", "/etc/shadow",
     "/var/run/secrets/kubernetes.io/serviceaccount/token", "/tmp/krb5cc_1000", "/srv/x/id_ed25519",
     "/run/user/1000/bus", "/data/people/ada/.local/share/jupyter/runtime/kernel.json"],
)  # fmt: skip
def test_sensitive_paths(path: str) -> None:
    assert is_sensitive(path, HOMES)
    assert sensitive(path, HOMES)


@pytest.mark.parametrize(
    "path",
    ["/", "/data/people/ada", "/data/people/ada/project/data.csv", "/data/people/ada/.sshfoo", "/etc/hosts",
     "/data/people/adam/.ssh/x", "/usr/lib/python3/ssh.py", "/run", "/tmp/x", "/tmp", "/home/other", "/home",
     "/data/people/ada/.local/share/jupyter/kernels/x/kernel.json", "", "relative/.ssh"],
)  # fmt: skip
def test_other_paths(path: str) -> None:
    assert not is_sensitive(path, HOMES)


@pytest.mark.parametrize(
    ("host", "port"),
    [("169.254.169.254", 80), ("[fd00:ec2::254]", 80), ("FD00:EC2:0::254", 0), ("::ffff:169.254.169.254", 80),
     ("2852039166", 80), ("0xa9fea9fe", 80), ("Metadata.Google.Internal.", 80), ("169.254.170.2", 80),
     ("100.100.100.200", 80), ("127.0.0.1", 2375), ("fe80::1%eth0", 10250)],
)  # fmt: skip
def test_sensitive_addresses(host: str, port: int) -> None:
    assert is_sensitive_address(host, port)


@pytest.mark.parametrize(
    "host", ["1.1.1.1", "example.org", "localhost", "::1", "", "x" * 300, "é.example", "a\0b"]
)
def test_other_addresses(host: str) -> None:
    assert not is_sensitive_address(host, 443)


def test_homes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "home").symlink_to(real)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert {str(real), str(tmp_path / "home"), "/root"} <= set(all_homes())
    assert "/" not in all_homes()
    assert (str(real / ".ssh"), "private keys") in sensitive_places(all_homes())

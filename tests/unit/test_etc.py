"""What of the system and of /etc a sandbox sees."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest
from jupyter_glovebox.sandbox import etc
from jupyter_glovebox.sandbox.base import Environment, SandboxError

from . import hostbox

NEVER = ("shadow", "gshadow", "ssh", "sudoers", "machine-id", "private", "keytab", "hosts", "kubernetes")


def test_system_is_usr_and_what_belongs_to_it() -> None:
    binds, links = etc.system_binds()
    targets = [bind.target for bind in binds]
    assert targets[0] == "/usr"
    assert {os.path.realpath(name) for _, name in links} <= {
        os.path.realpath(f"/{text}") for text, _ in links
    }
    for name in (*targets, *(name for _, name in links)):
        assert name.split("/")[1] in {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "sys"}
    assert not any(target.startswith("/sys") and not target.endswith("/cpu") for target in targets)


def test_binds_are_real_public_and_no_secret() -> None:
    binds = etc.etc_binds()
    assert {"/etc/ld.so.cache", "/etc/localtime"} <= {bind.target for bind in binds}
    files = etc.etc_files("ada", 1000, 1000, "/home/ada", "inside")
    assert not {bind.target for bind in binds} & set(files), "a name cannot be a bind and a file"
    for bind in binds:
        assert os.path.realpath(bind.source) == bind.source
        assert not any(word in bind.target or word in bind.source.split("/") for word in NEVER)
        for folder, _, names in os.walk(bind.source):
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    assert os.stat(path).st_mode & 0o004, f"{path} is not for everybody"


def test_a_private_file_keeps_its_folder_out(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    folder.mkdir()
    (folder / "a.pem").write_text("x")
    (folder / "a.pem").chmod(0o644)
    assert etc._public(str(folder))
    (folder / "b.pem").write_text("x")
    (folder / "b.pem").chmod(0o600)
    assert not etc._public(str(folder))
    (folder / "b.pem").unlink()
    (folder / "server.key").write_text("x")
    (folder / "server.key").chmod(0o644)
    assert not etc._public(str(folder))


def test_files_name_the_user_and_no_server() -> None:
    files = etc.etc_files("ada", 1234, 1235, "/data/home/ada", "inside")
    assert (
        files["/etc/passwd"].decode().splitlines()[0].startswith("ada:x:1234:1235:ada:/data/home/ada:/bin/")
    )
    assert b"nameserver" not in files["/etc/resolv.conf"]
    assert not any(word in name for name in files for word in NEVER if word != "hosts")
    assert files["/etc/hosts"].startswith(b"127.0.0.1 localhost inside\n")


def test_root_has_one_entry_that_is_the_sandbox_user() -> None:
    passwd = etc.etc_files("root", 1000, 1000, "/root", "inside")["/etc/passwd"].decode()
    assert [line for line in passwd.splitlines() if line.startswith("root:")] == [
        f"root:x:1000:1000:root:/root:{'/bin/bash' if os.path.exists('/bin/bash') else '/bin/sh'}"
    ]


@pytest.mark.parametrize("user", ["a:b", "a\nroot:x:0:0::/:/bin/sh", "", "a\0b"])
def test_a_name_cannot_add_an_account(user: str) -> None:
    with pytest.raises(SandboxError) as refused:
        etc.etc_files(user, 1000, 1000, "/home/ada", "inside")
    assert refused.value.stage == "validation"


def test_user_time_zone_certificates_and_names_work_inside(tmp_path: Path) -> None:
    code = (
        "import getpass, pwd, grp, os, json, time, ssl, socket, locale\n"
        "try: looked = socket.getaddrinfo('example.org', 443)\n"
        "except socket.gaierror as error: looked = error.errno\n"
        "print(json.dumps({'user': getpass.getuser(), 'pw': pwd.getpwuid(os.getuid()).pw_name,"
        " 'gr': grp.getgrgid(os.getgid()).gr_name, 'home': os.path.expanduser('~'),"
        " 'zone': time.strftime('%z', time.localtime(1e9)), 'looked': looked,"
        " 'local': socket.gethostbyname('localhost'), 'own': socket.gethostbyname(socket.gethostname()),"
        " 'cpus': os.cpu_count(), 'https': socket.getservbyname('https'), 'shadow': os.path.exists('/etc/shadow'),"
        " 'id': os.path.exists('/etc/machine-id'), 'certs': ssl.create_default_context().cert_store_stats()['x509'],"
        " 'text': 'é'}, ensure_ascii=False))\n"
    )
    home = str(tmp_path / "home")
    done = hostbox.run(
        Environment(binds=()),
        [hostbox.SYSTEM_PYTHON, "-c", code],
        home=home,
        workdir=str(tmp_path / "work"),
        user="ada",
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["user"], seen["pw"], seen["gr"], seen["home"]) == ("ada", "ada", "ada", home)
    assert seen["zone"] == datetime.datetime.fromtimestamp(1e9).astimezone().strftime("%z")
    assert isinstance(seen["looked"], int)
    assert (seen["local"], seen["own"], seen["https"]) == ("127.0.0.1", "127.0.0.1", 443)
    assert seen["cpus"] == os.cpu_count()
    assert not seen["shadow"]
    assert not seen["id"]
    assert seen["certs"] > 0
    assert seen["text"] == "é"

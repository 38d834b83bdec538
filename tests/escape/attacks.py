"""The attacks, as data. Each is Python that runs outside (where it must work) and inside (where it must not).

`T` holds targets, `attempt(f)` prints WORKED, or `refused` and the errno's name. `control` says what the
run outside needs: `plain`, `root` (only root can do it, so only root is tried inside), or `namespace`
(it works in a user namespace of one's own, where one has capabilities).
"""

from __future__ import annotations

import platform
from typing import Literal, NamedTuple

PRELUDE = """
import ctypes, errno, fcntl, json, mmap, os, signal, socket, stat, struct, subprocess, sys, time
T = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
class Raw(ctypes.Structure):
    pass
def call(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def need(condition):
    if not condition:
        raise OSError(errno.EPERM, "no effect")
def attempt(f):
    try:
        f()
    except OSError as error:
        print("refused", errno.errorcode.get(error.errno, error.errno))
    else:
        print("WORKED")
"""


class Attack(NamedTuple):
    group: str
    name: str
    code: str
    control: Literal["plain", "root", "namespace"] = "plain"
    x86_only: bool = False


_X86 = platform.machine() == "x86_64"
# number by name: x86-64, aarch64 (the newer ones are the same everywhere).
_NUMBERS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "kcmp": (312, 272), "add_key": (248, 217),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "clone": (56, 220), "personality": (135, 92),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "syslog": (103, 116), "acct": (163, 89),
    "swapon": (167, 224), "init_module": (175, 105), "kexec_load": (246, 104), "quotactl": (179, 60),
}  # fmt: skip


def _nr(name: str) -> int:
    return _NUMBERS[name][0 if _X86 else 1]


ATTACKS = [
    # What lies outside.
    Attack("outside", "read-absolute", "attempt(lambda: open(T['canary']).read())"),
    Attack("outside", "list-folder", "attempt(lambda: os.listdir(os.path.dirname(T['canary'])))"),
    Attack("outside", "read-relative", "attempt(lambda: open('../' * 40 + T['canary'][1:]).read())"),
    Attack("outside", "symlink", "os.symlink(T['canary'], T['dir'] + '/l'); attempt(lambda: open(T['dir'] + '/l').read())"),
    Attack(
        "outside", "symlink-chain",
        "os.symlink('b', T['dir'] + '/a'); os.symlink(os.path.dirname(T['canary']), T['dir'] + '/b')\n"
        "attempt(lambda: open(T['dir'] + '/a/' + os.path.basename(T['canary'])).read())",
    ),
    Attack("outside", "proc-root", "attempt(lambda: open(f\"/proc/{T['peer']}/root\" + T['canary']).read())"),
    Attack("outside", "proc-cwd", "attempt(lambda: open(f\"/proc/{T['peer']}/cwd/../\" + '../' * 30 + T['canary'][1:]).read())"),
    Attack("outside", "hard-link", "attempt(lambda: os.link(T['canary'], T['dir'] + '/h'))"),
    Attack(
        "outside", "openat2-dirfd",
        "fd = os.open('/', os.O_PATH)\nhow = struct.pack('QQQ', 0, 0, 0)\n"
        "attempt(lambda: call(437, fd, ctypes.c_char_p(T['canary'][1:].encode()), ctypes.c_char_p(how), 24))",
    ),
    Attack("outside", "execute", "attempt(lambda: subprocess.run([T['program']], check=True))"),
    # What is granted read-only.
    *(
        Attack("read-only", name, code)
        for name, code in (
            ("append", "attempt(lambda: open(T['input'], 'a').write('x'))"),
            ("truncate", "attempt(lambda: os.truncate(T['input'], 0))"),
            ("chmod", "attempt(lambda: os.chmod(T['input'], 0o600))"),
            ("utime", "attempt(lambda: os.utime(T['input']))"),
            ("unlink", "attempt(lambda: os.unlink(T['input']))"),
            ("rename", "attempt(lambda: os.rename(T['input'], T['input'] + '.away'))"),
            ("rename-onto", "p = os.path.dirname(T['input']) + '/other'\nattempt(lambda: os.rename(p, T['input']))"),
            ("create-beside", "attempt(lambda: open(os.path.dirname(T['input']) + '/new', 'w'))"),
            ("xattr", "attempt(lambda: os.setxattr(T['input'], 'user.x', b'1'))"),
            ("through-proc-fd", "fd = os.open(T['input'], os.O_RDONLY)\nattempt(lambda: os.open(f'/proc/self/fd/{fd}', os.O_WRONLY))"),
            ("shared-mapping", "fd = os.open(T['input'], os.O_RDONLY)\nattempt(lambda: (os.fchmod(fd, 0o666), os.open(T['input'], os.O_RDWR)))"),
            ("root-folder", "attempt(lambda: os.mkdir(T['root'] + '/new-folder'))"),
            ("files-of-the-sandbox", "attempt(lambda: open(T['own'] + '/stage.py', 'a'))"),
        )
    ),
    # Descriptors and environment.
    Attack(
        "inherited", "descriptor",
        "def f():\n    found = []\n    for n in range(3, 200):\n        try: found.append(os.pread(n, 99, 0))\n"
        "        except OSError: pass\n    need(any(T['secret'].encode() in c for c in found))\nattempt(f)",
    ),
    Attack(
        "inherited", "descriptor-of-pid-1",
        "def f():\n    opened = []\n    folder = f\"/proc/{T['peer']}/fd/\"\n    for n in os.listdir(folder):\n"
        "        try: opened.append(os.open(folder + n, os.O_RDONLY | os.O_NONBLOCK))\n"
        "        except OSError: pass\n    need(opened)\nattempt(f)",
    ),
    Attack(
        "inherited", "environment",
        "def f():\n    found = b''\n    for p in os.listdir('/proc'):\n        if p.isdigit():\n"
        "            for n in ('environ', 'cmdline'):\n                try: found += open(f'/proc/{p}/{n}', 'rb').read()\n"
        "                except OSError: pass\n    need(b'canary-of' + b'-the-host' in found)\nattempt(f)",
    ),
    # Namespaces and mounts.
    Attack("namespace", "unshare-user", f"attempt(lambda: call({_nr('unshare')}, 0x10000000))"),
    Attack("namespace", "unshare-user-mount", f"attempt(lambda: call({_nr('unshare')}, 0x10020000))"),
    Attack("namespace", "clone-user", f"def f():\n    pid = call({_nr('clone')}, 0x10000000 | 17, 0, 0, 0, 0)\n    if pid == 0: os._exit(0)\n    os.waitpid(pid, 0)\nattempt(f)"),
    Attack(
        "namespace", "clone3-user",
        "def f():\n    a = ctypes.create_string_buffer(struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0))\n"
        "    pid = call(435, a, 64)\n    if pid == 0: os._exit(0)\n    os.waitpid(pid, 0)\nattempt(f)",
    ),
    Attack("namespace", "setns", f"fd = os.open('/proc/self/ns/uts', os.O_RDONLY)\nattempt(lambda: call({_nr('setns')}, fd, 0))", "namespace"),
    Attack("namespace", "sethostname", "attempt(lambda: socket.sethostname('mine'))", "namespace"),
    Attack("mount", "tmpfs", f"attempt(lambda: call({_nr('mount')}, ctypes.c_char_p(b'none'), ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'tmpfs'), 0, 0))", "namespace"),
    Attack("mount", "bind", f"attempt(lambda: call({_nr('mount')}, ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'/tmp'), 0, 4096, 0))", "namespace"),
    Attack("mount", "remount", f"b = ctypes.c_char_p(T['mounted'].encode())\nattempt(lambda: (call({_nr('mount')}, b, b, 0, 4096, 0) if T['side'] == 'outside' else 0, call({_nr('mount')}, 0, b, 0, 4096 | 32, 0)))", "namespace"),
    Attack("mount", "umount", f"b = ctypes.c_char_p(T['mounted'].encode())\nattempt(lambda: (call({_nr('mount')}, b, b, 0, 4096, 0) if T['side'] == 'outside' else 0, call({_nr('umount2')}, b, 2)))", "namespace"),
    Attack("mount", "chroot", "attempt(lambda: os.chroot('/tmp'))", "namespace"),
    Attack("mount", "fsopen", "attempt(lambda: call(430, ctypes.c_char_p(b'tmpfs'), 0))", "namespace"),
    Attack("mount", "open-tree", "attempt(lambda: call(428, -100, ctypes.c_char_p(b'/tmp'), 1))", "namespace"),
    # Other processes.
    Attack("process", "kill-outside", "attempt(lambda: os.kill(T['sleeper'], 0))"),
    Attack(
        "process", "ptrace",
        f"p = subprocess.Popen(['sleep', '9'])\ntry: attempt(lambda: call({_nr('ptrace')}, 0x4206, p.pid, 0, 0))\nfinally: p.kill(); p.wait()",
    ),
    Attack(
        "process", "process-vm-readv",
        f"b = ctypes.create_string_buffer(8)\nv = ctypes.create_string_buffer(struct.pack('QQ', ctypes.addressof(b), 8))\nattempt(lambda: call({_nr('process_vm_readv')}, os.getpid(), v, 1, v, 1, 0))",
    ),
    Attack("process", "pidfd-getfd", "p = os.pidfd_open(os.getpid())\nattempt(lambda: call(438, p, 0, 0))"),
    Attack("process", "kcmp", f"attempt(lambda: call({_nr('kcmp')}, os.getpid(), os.getpid(), 0, 0, 0))"),
    Attack("process", "become-root", "attempt(lambda: (os.setresgid(0, 0, 0), os.setresuid(0, 0, 0), need(os.getuid() == 0)))", "namespace"),
    Attack("process", "capabilities", "attempt(lambda: need(any(int(l.split()[1], 16) for l in open('/proc/self/status') if l.startswith('Cap'))))", "namespace"),
    # Interfaces of the kernel.
    Attack("kernel", "add-key", f"attempt(lambda: call({_nr('add_key')}, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'x'), ctypes.c_char_p(b'y'), 1, -2))"),
    Attack("kernel", "keyctl", f"attempt(lambda: call({_nr('keyctl')}, 0, -2, 1))"),
    Attack("kernel", "io-uring", "p = ctypes.create_string_buffer(120)\nattempt(lambda: call(425, 1, p))"),
    Attack("kernel", "userfaultfd", f"attempt(lambda: call({_nr('userfaultfd')}, 1))"),
    Attack("kernel", "bpf", f"a = ctypes.create_string_buffer(struct.pack('IIIIII', 2, 4, 4, 1, 0, 0) + bytes(104))\nattempt(lambda: call({_nr('bpf')}, 0, a, 128))", "root"),
    Attack("kernel", "perf", f"a = ctypes.create_string_buffer(struct.pack('IIQ', 1, 128, 0) + bytes(112))\nattempt(lambda: call({_nr('perf_event_open')}, a, 0, -1, -1, 0))", "root"),
    Attack("kernel", "fanotify", f"attempt(lambda: call({_nr('fanotify_init')}, 0x200, 0))"),
    Attack("kernel", "file-handle", f"h = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128))\nm = ctypes.c_int()\nattempt(lambda: call({_nr('name_to_handle_at')}, -100, ctypes.c_char_p(b'/usr'), h, ctypes.byref(m), 0))"),
    Attack("kernel", "personality", f"attempt(lambda: call({_nr('personality')}, 0x0040000))"),
    Attack("kernel", "syslog", f"attempt(lambda: call({_nr('syslog')}, 10, 0, 0))", "root"),
    Attack("kernel", "sysctl", "attempt(lambda: os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))", "root"),
    Attack("kernel", "sysctl-vm", "attempt(lambda: os.open('/proc/sys/vm/drop_caches', os.O_WRONLY))", "root"),
    Attack("kernel", "kernel-log", "attempt(lambda: os.open('/proc/kmsg', os.O_RDONLY | os.O_NONBLOCK))", "root"),
    Attack("kernel", "page-flags", "attempt(lambda: os.read(os.open('/proc/kpageflags', os.O_RDONLY), 8))", "root"),
    Attack("kernel", "cgroup-files", "attempt(lambda: os.listdir('/sys/fs/cgroup'))"),
    Attack(
        "kernel", "tiocsti",
        "def f():\n    a, b = os.openpty()\n    os.setsid()\n    fcntl.ioctl(b, 0x540e, 0)\n    fcntl.ioctl(b, 0x5412, b'x')\n"
        "pid = os.fork()\nif pid == 0:\n    attempt(f)\n    sys.stdout.flush()\n    os._exit(0)\nos.waitpid(pid, 0)",
    ),
    # Devices.
    Attack("device", "make-node", "attempt(lambda: os.mknod(T['dir'] + '/n', 0o020600, os.makedev(1, 3)))", "root"),
    Attack("device", "make-disk", "attempt(lambda: os.mknod(T['dir'] + '/d', 0o060600, os.makedev(7, 77)))", "root"),
    Attack("device", "chmod-node", "attempt(lambda: os.chmod(T['null'], 0o666))", "root"),
    Attack("device", "chmod-stdin", "attempt(lambda: os.fchmod(0, 0o666))", "root"),
    # Network and IPC.
    Attack("network", "tcp-host-loopback", "attempt(lambda: socket.create_connection(('127.0.0.1', T['port']), 5))"),
    Attack("network", "abstract-socket", "s = socket.socket(socket.AF_UNIX)\nattempt(lambda: s.connect('\\0' + T['abstract']))"),
    Attack("network", "socket-file", "s = socket.socket(socket.AF_UNIX)\nattempt(lambda: s.connect(T['socket']))"),
    Attack("network", "netlink-uevent", "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15))"),
    Attack("network", "packet-socket", "attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))", "root"),
    Attack("network", "vsock", "attempt(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    Attack("network", "unix-sockets-of-host", "attempt(lambda: need(T['abstract'] in open('/proc/net/unix').read()))"),
    Attack("network", "shared-memory", "attempt(lambda: need(libc.shmget(T['shm'], 0, 0) >= 0))"),
]  # fmt: skip

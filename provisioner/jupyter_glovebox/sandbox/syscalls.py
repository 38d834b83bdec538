"""System calls that the sandbox denies or watches: numbers per machine, and what happens to each.

Sources: the kernel's syscall tables (arch/x86/entry/syscalls/syscall_64.tbl and, for aarch64,
include/uapi/asm-generic/unistd.h); syscalls(2). From 424 on all machines share their numbers.
"""

from __future__ import annotations

EPERM, ENOSYS, ESOCKTNOSUPPORT, EAFNOSUPPORT = 1, 38, 94, 97

NEWEST = 469
"""Calls above this number did not exist when this list was made: they answer ENOSYS."""

# name: (x86-64, aarch64); None where the machine has no such call.
_OTHERS_PROCESSES = "would reach into other processes"
_KEYS = "kernel keys are shared by everything of a user"
_KERNEL = "changes or inspects the kernel or the whole machine"
_MOUNTS = "changes namespaces or mounts"
_NEWER = "a newer interface; programs fall back"
DENIED: dict[str, tuple[int | None, int | None, int, str]] = {
    "ptrace": (101, 117, EPERM, _OTHERS_PROCESSES),
    "process_vm_readv": (310, 270, EPERM, _OTHERS_PROCESSES),
    "process_vm_writev": (311, 271, EPERM, _OTHERS_PROCESSES),
    "pidfd_getfd": (438, 438, EPERM, _OTHERS_PROCESSES),
    "process_madvise": (440, 440, EPERM, _OTHERS_PROCESSES),
    "kcmp": (312, 272, EPERM, _OTHERS_PROCESSES),
    "keyctl": (250, 219, EPERM, _KEYS),
    "add_key": (248, 217, EPERM, _KEYS),
    "request_key": (249, 218, EPERM, _KEYS),
    "bpf": (321, 280, EPERM, _KERNEL),
    "perf_event_open": (298, 241, EPERM, _KERNEL),
    "userfaultfd": (323, 282, EPERM, "lets a program stop the kernel in the middle of a copy"),
    "kexec_load": (246, 104, EPERM, _KERNEL),
    "kexec_file_load": (320, 294, EPERM, _KERNEL),
    "init_module": (175, 105, EPERM, _KERNEL),
    "finit_module": (313, 273, EPERM, _KERNEL),
    "delete_module": (176, 106, EPERM, _KERNEL),
    "create_module": (174, None, ENOSYS, _KERNEL),
    "get_kernel_syms": (177, None, ENOSYS, _KERNEL),
    "query_module": (178, None, ENOSYS, _KERNEL),
    "reboot": (169, 142, EPERM, _KERNEL),
    "swapon": (167, 224, EPERM, _KERNEL),
    "swapoff": (168, 225, EPERM, _KERNEL),
    "acct": (163, 89, EPERM, _KERNEL),
    "quotactl": (179, 60, EPERM, _KERNEL),
    "quotactl_fd": (443, 443, EPERM, _KERNEL),
    "syslog": (103, 116, EPERM, _KERNEL),
    "iopl": (172, None, EPERM, _KERNEL),
    "ioperm": (173, None, EPERM, _KERNEL),
    "modify_ldt": (154, None, EPERM, "old 16-bit code; a source of kernel flaws"),
    "uselib": (134, None, ENOSYS, "obsolete"),
    "_sysctl": (156, None, ENOSYS, "obsolete"),
    "nfsservctl": (180, 42, ENOSYS, "obsolete"),
    "lookup_dcookie": (212, 18, EPERM, _KERNEL),
    "vhangup": (153, 58, EPERM, _KERNEL),
    "settimeofday": (164, 170, EPERM, _KERNEL),
    "clock_settime": (227, 112, EPERM, _KERNEL),
    "clock_adjtime": (305, 266, EPERM, _KERNEL),
    "sethostname": (170, 161, EPERM, _KERNEL),
    "setdomainname": (171, 162, EPERM, _KERNEL),
    "name_to_handle_at": (303, 264, EPERM, "opens files past the mount namespace"),
    "open_by_handle_at": (304, 265, EPERM, "opens files past the mount namespace"),
    "fanotify_init": (300, 262, EPERM, "watches whole file systems"),
    "fanotify_mark": (301, 263, EPERM, "watches whole file systems"),
    "mbind": (237, 235, EPERM, "memory placement is the host's"),
    "set_mempolicy": (238, 237, EPERM, "memory placement is the host's"),
    "set_mempolicy_home_node": (450, 450, EPERM, "memory placement is the host's"),
    "migrate_pages": (256, 238, EPERM, "memory placement is the host's"),
    "move_pages": (279, 239, EPERM, "memory placement is the host's"),
    "unshare": (272, 97, EPERM, _MOUNTS),
    "setns": (308, 268, EPERM, _MOUNTS),
    "mount": (165, 40, EPERM, _MOUNTS),
    "umount2": (166, 39, EPERM, _MOUNTS),
    "pivot_root": (155, 41, EPERM, _MOUNTS),
    "chroot": (161, 51, EPERM, _MOUNTS),
    "lsm_set_self_attr": (460, 460, EPERM, _KERNEL),
    "open_tree": (428, 428, ENOSYS, _NEWER),
    "move_mount": (429, 429, ENOSYS, _NEWER),
    "fsopen": (430, 430, ENOSYS, _NEWER),
    "fsconfig": (431, 431, ENOSYS, _NEWER),
    "fsmount": (432, 432, ENOSYS, _NEWER),
    "fspick": (433, 433, ENOSYS, _NEWER),
    "mount_setattr": (442, 442, ENOSYS, _NEWER),
    "statmount": (457, 457, ENOSYS, _NEWER),
    "listmount": (458, 458, ENOSYS, _NEWER),
    "open_tree_attr": (467, 467, ENOSYS, _NEWER),
    "clone3": (
        435,
        435,
        ENOSYS,
        "its flags lie in memory, where a filter cannot see them; programs use clone",
    ),
    "io_uring_setup": (425, 425, ENOSYS, "makes calls that no filter sees"),
    "io_uring_enter": (426, 426, ENOSYS, "makes calls that no filter sees"),
    "io_uring_register": (427, 427, ENOSYS, "makes calls that no filter sees"),
    "memfd_secret": (447, 447, ENOSYS, "memory that no accounting sees"),
}
# Calls that are allowed with some arguments only; seccomp.py has the rules.
CONDITIONAL: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "ioctl": (16, 29),
    "personality": (135, 92),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
# Calls whose paths or addresses the supervisor sees: name: (x86-64, aarch64, operation).
WATCHED: dict[str, tuple[int | None, int | None, str]] = {
    "open": (2, None, "open"),
    "openat": (257, 56, "open"),
    "openat2": (437, 437, "open"),
    "creat": (85, None, "open"),
    "execve": (59, 221, "exec"),
    "execveat": (322, 281, "exec"),
    "unlink": (87, None, "delete"),
    "unlinkat": (263, 35, "delete"),
    "rmdir": (84, None, "delete"),
    "rename": (82, None, "rename"),
    "renameat": (264, 38, "rename"),
    "renameat2": (316, 276, "rename"),
    "mkdir": (83, None, "create"),
    "mkdirat": (258, 34, "create"),
    "mknod": (133, None, "create"),
    "mknodat": (259, 33, "create"),
    "link": (86, None, "link"),
    "linkat": (265, 37, "link"),
    "symlink": (88, None, "symlink"),
    "symlinkat": (266, 36, "symlink"),
    "truncate": (76, 45, "change"),
    "chmod": (90, None, "change"),
    "fchmodat": (268, 53, "change"),
    "fchmodat2": (452, 452, "change"),
    "chown": (92, None, "change"),
    "lchown": (94, None, "change"),
    "fchownat": (260, 54, "change"),
    "utime": (132, None, "change"),
    "utimes": (235, None, "change"),
    "utimensat": (280, 88, "change"),
    "futimesat": (261, None, "change"),
    "connect": (42, 203, "connect"),
    "sendmmsg": (307, 269, "lookup"),
}
# Watched only when an address is given (argument 4 is not NULL).
WATCHED_WITH_ADDRESS: dict[str, tuple[int, int, str]] = {"sendto": (44, 206, "connect")}


def column(machine: str) -> int:
    """0 for x86-64, 1 for aarch64.

    Raises:
        KeyError: another machine.
    """
    return {"x86_64": 0, "aarch64": 1}[machine]

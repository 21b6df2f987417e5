"""System call filters: compile a list of allowed calls to seccomp programs and install them for the process, for good.

Guarantees: an allowed call behaves as without the filter. A call that the profile does not name fails with EPERM, and the kernel
writes a line to its log (type=1326, with the number of the call). A call newer than the table of numbers fails with ENOSYS and without
a line, so that a C library newer than this table uses the older call instead. No call ends the process: a filter that is too narrow
costs one operation, never the job's file system. syscall_profiles.py lists the calls of each kind of process.

A profile becomes two programs, because the kernel logs either all refusals of a program or none: the first answers ENOSYS to calls
that a C library tries routinely (clone3, for each thread), the second refuses. Each is classic BPF: a binary search over runs of call
numbers, seven comparisons for 300 calls. Linux 5.11 and later evaluate them once for each call whose arguments are not examined, and
then answer from a bitmap.

The table has (x86-64, arm64), None where the architecture lacks the call. Up to ``set_mempolicy_home_node`` (450) it holds what the
user-space headers of Linux 6.1 define (asm/unistd_64.h and asm-generic/unistd.h, Debian's linux-libc-dev); later calls have one number
on both architectures (Linux 6.18, scripts/syscall.tbl). tests/unit/system/sandbox/test_seccomp.py compares the table with the headers
of the machine.

References: seccomp(2), linux/filter.h, linux/seccomp.h, linux/audit.h, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

LAST_NUMBER: Final = 470
"""Highest number in the table (listns, Linux 6.18). Higher numbers are unknown to this version of ciuic."""

# fmt: off
NUMBERS: Final[dict[str, tuple[int | None, int | None]]] = {
    "_sysctl": (156, None), "accept": (43, 202), "accept4": (288, 242), "access": (21, None),
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "afs_syscall": (183, None),
    "alarm": (37, None), "arch_prctl": (158, None), "bind": (49, 200), "bpf": (321, 280), "brk": (12, 214),
    "cachestat": (451, 451), "capget": (125, 90), "capset": (126, 91), "chdir": (80, 49), "chmod": (90, None),
    "chown": (92, None), "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_getres": (229, 114),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "clock_settime": (227, 112),
    "clone": (56, 220), "clone3": (435, 435), "close": (3, 57), "close_range": (436, 436),
    "connect": (42, 203), "copy_file_range": (326, 285), "creat": (85, None), "create_module": (174, None),
    "delete_module": (176, 106), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_ctl_old": (214, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "epoll_wait": (232, None), "epoll_wait_old": (215, None), "eventfd": (284, None), "eventfd2": (290, 19),
    "execve": (59, 221), "execveat": (322, 281), "exit": (60, 93), "exit_group": (231, 94),
    "faccessat": (269, 48), "faccessat2": (439, 439), "fadvise64": (221, 223), "fallocate": (285, 47),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "fchdir": (81, 50), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "fcntl": (72, 25), "fdatasync": (75, 83), "fgetxattr": (193, 10), "file_getattr": (468, 468),
    "file_setattr": (469, 469), "finit_module": (313, 273), "flistxattr": (196, 13), "flock": (73, 32),
    "fork": (57, None), "fremovexattr": (199, 16), "fsconfig": (431, 431), "fsetxattr": (190, 7),
    "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "fstat": (5, 80), "fstatfs": (138, 44),
    "fsync": (74, 82), "ftruncate": (77, 46), "futex": (202, 98), "futex_requeue": (456, 456),
    "futex_wait": (455, 455), "futex_waitv": (449, 449), "futex_wake": (454, 454), "futimesat": (261, None),
    "get_kernel_syms": (177, None), "get_mempolicy": (239, 236), "get_robust_list": (274, 100),
    "get_thread_area": (211, None), "getcpu": (309, 168), "getcwd": (79, 17), "getdents": (78, None),
    "getdents64": (217, 61), "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176),
    "getgroups": (115, 158), "getitimer": (36, 102), "getpeername": (52, 205), "getpgid": (121, 155),
    "getpgrp": (111, None), "getpid": (39, 172), "getpmsg": (181, None), "getppid": (110, 173),
    "getpriority": (140, 141), "getrandom": (318, 278), "getresgid": (120, 150), "getresuid": (118, 148),
    "getrlimit": (97, 163), "getrusage": (98, 165), "getsid": (124, 156), "getsockname": (51, 204),
    "getsockopt": (55, 209), "gettid": (186, 178), "gettimeofday": (96, 169), "getuid": (102, 174),
    "getxattr": (191, 8), "getxattrat": (464, 464), "init_module": (175, 105), "inotify_add_watch": (254, 27),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_rm_watch": (255, 28),
    "io_cancel": (210, 3), "io_destroy": (207, 1), "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    "io_setup": (206, 0), "io_submit": (209, 2), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None),
    "iopl": (172, None), "ioprio_get": (252, 31), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "kill": (62, 129),
    "landlock_add_rule": (445, 445), "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446), "lchown": (94, None), "lgetxattr": (192, 9), "link": (86, None),
    "linkat": (265, 37), "listen": (50, 201), "listmount": (458, 458), "listns": (470, 470),
    "listxattr": (194, 11), "listxattrat": (465, 465), "llistxattr": (195, 12), "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15), "lseek": (8, 62), "lsetxattr": (189, 6), "lsm_get_self_attr": (459, 459),
    "lsm_list_modules": (461, 461), "lsm_set_self_attr": (460, 460), "lstat": (6, None), "madvise": (28, 233),
    "map_shadow_stack": (453, 453), "mbind": (237, 235), "membarrier": (324, 283), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "migrate_pages": (256, 238), "mincore": (27, 232), "mkdir": (83, None),
    "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33), "mlock": (149, 228),
    "mlock2": (325, 284), "mlockall": (151, 230), "mmap": (9, 222), "modify_ldt": (154, None),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "mprotect": (10, 226), "mq_getsetattr": (245, 185), "mq_notify": (244, 184), "mq_open": (240, 180),
    "mq_timedreceive": (243, 183), "mq_timedsend": (242, 182), "mq_unlink": (241, 181), "mremap": (25, 216),
    "mseal": (462, 462), "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188), "msgsnd": (69, 189),
    "msync": (26, 227), "munlock": (150, 229), "munlockall": (152, 231), "munmap": (11, 215),
    "name_to_handle_at": (303, 264), "nanosleep": (35, 101), "newfstatat": (262, 79), "nfsservctl": (180, 42),
    "open": (2, None), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "openat": (257, 56), "openat2": (437, 437), "pause": (34, None), "perf_event_open": (298, 241),
    "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pipe": (22, None), "pipe2": (293, 59), "pivot_root": (155, 41),
    "pkey_alloc": (330, 289), "pkey_free": (331, 290), "pkey_mprotect": (329, 288), "poll": (7, None),
    "ppoll": (271, 73), "prctl": (157, 167), "pread64": (17, 67), "preadv": (295, 69), "preadv2": (327, 286),
    "prlimit64": (302, 261), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pselect6": (270, 72),
    "ptrace": (101, 117), "putpmsg": (182, None), "pwrite64": (18, 68), "pwritev": (296, 70),
    "pwritev2": (328, 287), "query_module": (178, None), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "read": (0, 63), "readahead": (187, 213), "readlink": (89, None), "readlinkat": (267, 78),
    "readv": (19, 65), "reboot": (169, 142), "recvfrom": (45, 207), "recvmmsg": (299, 243),
    "recvmsg": (47, 212), "remap_file_pages": (216, 234), "removexattr": (197, 14),
    "removexattrat": (466, 466), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "request_key": (249, 218), "restart_syscall": (219, 128), "rmdir": (84, None), "rseq": (334, 293),
    "rt_sigaction": (13, 134), "rt_sigpending": (127, 136), "rt_sigprocmask": (14, 135),
    "rt_sigqueueinfo": (129, 138), "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "rt_tgsigqueueinfo": (297, 240), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_getaffinity": (204, 123), "sched_getattr": (315, 275),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "sched_rr_get_interval": (148, 127),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_yield": (24, 124), "seccomp": (317, 277),
    "security": (185, None), "select": (23, None), "semctl": (66, 191), "semget": (64, 190),
    "semop": (65, 193), "semtimedop": (220, 192), "sendfile": (40, 71), "sendmmsg": (307, 269),
    "sendmsg": (46, 211), "sendto": (44, 206), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "set_robust_list": (273, 99), "set_thread_area": (205, None),
    "set_tid_address": (218, 96), "setdomainname": (171, 162), "setfsgid": (123, 152), "setfsuid": (122, 151),
    "setgid": (106, 144), "setgroups": (116, 159), "sethostname": (170, 161), "setitimer": (38, 103),
    "setns": (308, 268), "setpgid": (109, 154), "setpriority": (141, 140), "setregid": (114, 143),
    "setresgid": (119, 149), "setresuid": (117, 147), "setreuid": (113, 145), "setrlimit": (160, 164),
    "setsid": (112, 157), "setsockopt": (54, 208), "settimeofday": (164, 170), "setuid": (105, 146),
    "setxattr": (188, 5), "setxattrat": (463, 463), "shmat": (30, 196), "shmctl": (31, 195),
    "shmdt": (67, 197), "shmget": (29, 194), "shutdown": (48, 210), "sigaltstack": (131, 132),
    "signalfd": (282, None), "signalfd4": (289, 74), "socket": (41, 198), "socketpair": (53, 199),
    "splice": (275, 76), "stat": (4, None), "statfs": (137, 43), "statmount": (457, 457), "statx": (332, 291),
    "swapoff": (168, 225), "swapon": (167, 224), "symlink": (88, None), "symlinkat": (266, 36),
    "sync": (162, 81), "sync_file_range": (277, 84), "syncfs": (306, 267), "sysfs": (139, None),
    "sysinfo": (99, 179), "syslog": (103, 116), "tee": (276, 77), "tgkill": (234, 131), "time": (201, None),
    "timer_create": (222, 107), "timer_delete": (226, 111), "timer_getoverrun": (225, 109),
    "timer_gettime": (224, 108), "timer_settime": (223, 110), "timerfd_create": (283, 85),
    "timerfd_gettime": (287, 87), "timerfd_settime": (286, 86), "times": (100, 153), "tkill": (200, 130),
    "truncate": (76, 45), "tuxcall": (184, None), "umask": (95, 166), "umount2": (166, 39),
    "uname": (63, 160), "unlink": (87, None), "unlinkat": (263, 35), "unshare": (272, 97),
    "uselib": (134, None), "userfaultfd": (323, 282), "ustat": (136, None), "utime": (132, None),
    "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None), "vhangup": (153, 58),
    "vmsplice": (278, 75), "vserver": (236, None), "wait4": (61, 260), "waitid": (247, 95), "write": (1, 64),
    "writev": (20, 66),
}
# fmt: on


_LOAD_WORD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP: Final = 0x05  # BPF_JMP | BPF_JA
_JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_MAX_CONDITIONAL_JUMP: Final = 255  # jt and jf of struct sock_filter are bytes
_INSTRUCTION: Final = struct.Struct("=HBBI")  # struct sock_filter

# Offsets in struct seccomp_data. Both architectures are little-endian: the low half of an argument comes first.
_NUMBER_OFFSET: Final = 0
_ARCHITECTURE_OFFSET: Final = 4
_ARGUMENTS_OFFSET: Final = 16
_ARGUMENT_BYTES: Final = 8

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_REFUSE: Final = _ERRNO | errno.EPERM
_UNKNOWN: Final = _ERRNO | errno.ENOSYS

_SET_MODE_FILTER: Final = 1
_GET_ACTION_AVAIL: Final = 2
# For every thread of the process.
_FLAG_TSYNC: Final = 1
# Refusals are written to the kernel's log (Linux 4.14).
_FLAG_LOG: Final = 2
# Before Linux 5.16 a filter switched on the mitigation of speculative store bypass, which slows down the whole process. It protects
# against untrusted code in the same process, of which ciuic runs none.
_FLAG_SPEC_ALLOW: Final = 4
_PR_GET_NO_NEW_PRIVS: Final = 39


class _Architecture(NamedTuple):
    """Constants of one architecture."""

    column: int
    """Column of `NUMBERS`."""
    audit: int
    """Value of AUDIT_ARCH_…; system calls of 32-bit programs, with other numbers, have another one."""
    seccomp: int
    """System call number of seccomp(2)."""


_ARCHITECTURES: Final = {
    "x86_64": _Architecture(0, 0xC000003E, 317),
    "aarch64": _Architecture(1, 0xC00000B7, 277),
}

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Unavailable(Exception):
    """System call filters cannot be installed on this machine or in this process; the message says why."""


class Forbidden(Unavailable):
    """Another filter, of a service or a container, forbids seccomp(2)."""


class Condition(NamedTuple):
    """A test of the low 32 bits of one argument, which decides whether the call is allowed."""

    argument: int
    values: tuple[int, ...]
    mask: int | None = None
    allows: bool = True
    """True: a match allows the call; False: it refuses the call."""


class Profile(NamedTuple):
    """System calls of one kind of process."""

    name: str
    allowed: frozenset[str]
    conditions: Mapping[str, tuple[Condition, ...]] = {}
    """Conditions of allowed calls, all of which must hold."""
    absent: frozenset[str] = frozenset()
    """Calls that fail with ENOSYS, because the C library then uses another call whose arguments a filter can see."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def machine() -> str:
    """Return the name of the architecture in `_ARCHITECTURES`, or another name where filters are not supported."""
    # A 32-bit interpreter on a 64-bit kernel has other call numbers.
    wide = struct.calcsize("P") == 8
    return os.uname().machine if wide else f"{os.uname().machine}, 32 bits"


def assemble(profile: Profile, machine: str) -> tuple[bytes, bytes]:
    """Translate a profile into two arrays of struct sock_filter, to be installed in this order.

    Raises:
        Unavailable: The architecture is not supported.
        KeyError: The profile names a call that is not in the table.
    """
    architecture = _architecture(machine)
    absent: list[tuple[bytes, ...]] = [_ALLOWED] * (LAST_NUMBER + 1)
    refused: list[tuple[bytes, ...]] = [_REFUSED] * (LAST_NUMBER + 1)
    for name in profile.absent:
        number = NUMBERS[name][architecture.column]
        if number is not None:
            absent[number], refused[number] = _NOT_THERE, _ALLOWED
    for name in profile.allowed:
        number = NUMBERS[name][architecture.column]
        if number is not None:
            refused[number] = _allowed_if(profile.conditions.get(name, ()))
    # The last action is for numbers beyond the table, among them x32 calls, which have bit 30 set.
    return _program([*absent, _NOT_THERE], architecture), _program([*refused, _ALLOWED], architecture)


def install(profile: Profile) -> None:
    """Filter the calls of this process, of its threads and of its children.

    Needs no_new_privs, which `privileges.keep_only` sets. Without it the kernel accepts a filter from CAP_SYS_ADMIN alone, and a
    setuid program would run under it.

    Raises:
        Unavailable: The architecture is not supported, no_new_privs is not set, or the kernel refuses.
    """
    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise Unavailable("a system call filter needs no_new_privs, which is not set")
    absent, refused = assemble(profile, machine())
    _load_program(absent, (_FLAG_TSYNC | _FLAG_SPEC_ALLOW, _FLAG_TSYNC))
    logged = _FLAG_TSYNC | _FLAG_LOG
    _load_program(refused, (logged | _FLAG_SPEC_ALLOW, logged, _FLAG_TSYNC))


def _load_program(code: bytes, flag_choices: Sequence[int]) -> None:
    program = _Program(len(code) // _INSTRUCTION.size, code)
    number = _architecture(machine()).seccomp
    result = -1
    # An older kernel answers EINVAL to flags that it does not know.
    for flags in flag_choices:
        result = _syscall(
            ctypes.c_long(number),
            ctypes.c_uint(_SET_MODE_FILTER),
            ctypes.c_uint(flags),
            ctypes.byref(program),
        )
        if result == 0 or ctypes.get_errno() != errno.EINVAL:
            break
    if result > 0:
        raise Unavailable(
            f"thread {result} has filters of its own; filter the process before threads are started"
        )
    if result < 0:
        refusal = ctypes.get_errno()
        # seccomp(2) itself answers EACCES where a privilege is missing.
        kind = Forbidden if refusal == errno.EPERM else Unavailable
        raise kind(f"the kernel refuses the system call filter: {os.strerror(refusal)}")


def offered() -> str:
    """Return why this machine cannot filter system calls; empty where it can. Changes nothing."""
    try:
        number = _architecture(machine()).seccomp
    except Unavailable as error:
        return str(error)
    action = ctypes.c_uint32(_REFUSE & 0xFFFF0000)
    if _syscall(ctypes.c_long(number), ctypes.c_uint(_GET_ACTION_AVAIL), 0, ctypes.byref(action)) != 0:
        return f"the kernel does not support system call filters: {os.strerror(ctypes.get_errno())}"
    return ""


def _architecture(machine: str) -> _Architecture:
    if machine not in _ARCHITECTURES:
        raise Unavailable(
            f"system call filters are supported on {', '.join(_ARCHITECTURES)}, not for {machine}"
        )
    return _ARCHITECTURES[machine]


def _program(actions: Sequence[tuple[bytes, ...]], architecture: _Architecture) -> bytes:
    """Return instructions that carry out ``actions[number]``, and the last action for all numbers beyond."""
    runs: list[tuple[int, tuple[bytes, ...]]] = []
    for number, action in enumerate(actions):
        if not runs or runs[-1][1] != action:
            runs.append((number, action))
    # Checked first: 32-bit calls have other numbers, so that one which the profile refuses may have the
    # number of one that it allows.
    same_architecture = _INSTRUCTION.pack(_JUMP_EQUAL, 1, 0, architecture.audit)
    head = (_load(_ARCHITECTURE_OFFSET), same_architecture, _return(_REFUSE), _load(_NUMBER_OFFSET))
    return b"".join((*head, *_search(runs)))


def _allowed_if(conditions: Sequence[Condition]) -> tuple[bytes, ...]:
    code: list[bytes] = []
    for condition in conditions:
        code.append(_load(_ARGUMENTS_OFFSET + _ARGUMENT_BYTES * condition.argument))
        if condition.mask is not None:
            code.append(_INSTRUCTION.pack(_AND, 0, 0, condition.mask))
        for left, value in zip(range(len(condition.values) - 1, -1, -1), condition.values, strict=True):
            # A match jumps over the remaining comparisons, and over the RETURN as well if a match allows the call.
            code.append(_INSTRUCTION.pack(_JUMP_EQUAL, left + (1 if condition.allows else 0), 0, value))
        if not condition.allows:
            # Without a match the last comparison has to jump over the RETURN that refuses.
            code[-1] = _INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, condition.values[-1])
        code.append(_return(_REFUSE))
    return (*code, *_ALLOWED)


def _search(runs: Sequence[tuple[int, tuple[bytes, ...]]]) -> list[bytes]:
    """Return a binary search for the run that contains the accumulator; the action of each run ends the program."""
    if len(runs) == 1:
        return list(runs[0][1])
    middle = len(runs) // 2
    below, above = _search(runs[:middle]), _search(runs[middle:])
    start = runs[middle][0]
    if len(below) <= _MAX_CONDITIONAL_JUMP:
        return [_INSTRUCTION.pack(_JUMP_AT_LEAST, len(below), 0, start), *below, *above]
    # An unconditional jump has 32 bits for its distance.
    far = _INSTRUCTION.pack(_JUMP, 0, 0, len(below))
    return [_INSTRUCTION.pack(_JUMP_AT_LEAST, 0, 1, start), far, *below, *above]


def _load(offset: int) -> bytes:
    return _INSTRUCTION.pack(_LOAD_WORD, 0, 0, offset)


def _return(action: int) -> bytes:
    return _INSTRUCTION.pack(_RETURN, 0, 0, action)


_ALLOWED: Final = (_return(_ALLOW),)
_REFUSED: Final = (_return(_REFUSE),)
_NOT_THERE: Final = (_return(_UNKNOWN),)

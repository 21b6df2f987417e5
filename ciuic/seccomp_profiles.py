"""System calls that each kind of process may make, and the function that begins to hold it to them.

Guarantees: what a kind needs is listed, all else is refused with EPERM (seccomp.py); a process that cannot be filtered goes
on without a filter, because a job's file system and its snapshots are worth more. Every list is wider than what was seen
in the test suites (docs/system-calls.md): a C library may choose another call of the same sort. No list has a call
that starts a program, makes a process, looks into another process, loads code into the kernel, changes a namespace or
reaches a network.
"""

from __future__ import annotations

import os
from typing import Final

from ciuic import seccomp
from ciuic.seccomp import Condition, Profile

_AF_UNIX: Final = 1
_CLONE_THREAD: Final = 0x00010000
_PROT_WRITE, _PROT_EXEC = 2, 4
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOCLEX, _FIONCLEX, _FIONBIO, _FIONREAD = 0x5451, 0x5450, 0x5421, 0x541B
_TCGETS = 0x5401  # asked by open() of what it has opened by name
# MS_REMOUNT, MS_BIND, MS_MOVE, MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE, MS_SHARED: what changes existing mounts.
_MS_EXISTING: Final = 1 << 5 | 1 << 12 | 1 << 13 | 1 << 17 | 1 << 18 | 1 << 19 | 1 << 20


# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_CLONE_NAMESPACES: Final = (
    0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
)
_OPENED_TO_WRITE: Final = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEMORY: Final = _names(
    "brk mmap munmap mremap mprotect madvise mincore msync membarrier mlock munlock mlock2"
)
_THREADS: Final = _names("""
    clone futex futex_waitv futex_wait futex_wake futex_requeue set_robust_list get_robust_list rseq set_tid_address gettid
    getpid getppid tgkill exit exit_group sched_yield sched_getaffinity sched_getscheduler sched_getparam
    sched_get_priority_max sched_get_priority_min sched_getattr getpriority ioprio_get getcpu arch_prctl prctl
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall pause
""")
_TIME: Final = _names("""
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
    timerfd_create timerfd_settime timerfd_gettime
""")
_WAITING: Final = _names("""
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2 pipe pipe2
""")
_KNOWING: Final = _names("""
    getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid capget uname sysinfo getrusage
    getrlimit prlimit64 getrandom get_mempolicy
""")
_DESCRIPTORS: Final = _names("""
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3 fcntl
    fstat newfstatat statx
""")
_READING: Final = _names("""
    open openat openat2 stat lstat access faccessat faccessat2 readlink readlinkat statfs fstatfs getdents getdents64
    getcwd chdir fchdir getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat
    name_to_handle_at fadvise64 readahead cachestat file_getattr flock ioctl
""")
_WRITING: Final = _names("""
    creat truncate ftruncate fallocate fsync fdatasync sync_file_range syncfs sendfile splice tee vmsplice copy_file_range
    mkdir mkdirat rmdir link linkat unlink unlinkat symlink symlinkat rename renameat renameat2
    chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat umask memfd_create
""")
_OWNING: Final = _names("""
    chown fchown lchown fchownat mknod mknodat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr
    fremovexattr removexattrat file_setattr
""")
_ANSWERING: Final = _names("""
    sendto recvfrom sendmsg recvmsg getsockopt setsockopt getsockname getpeername shutdown
""")
_SERVING: Final = _names("socket socketpair bind listen accept accept4 connect") | _ANSWERING

_UNIX_ONLY: Final = (Condition(0, (_AF_UNIX,)),)
_CONDITIONS: Final = {
    "clone": (Condition(0, (_CLONE_THREAD,), mask=_CLONE_THREAD),),  # threads, never processes
    # Memory is writable or executable, never both and never first one and then the other: no code is made at run time.
    "mmap": (Condition(2, (_PROT_WRITE | _PROT_EXEC,), mask=_PROT_WRITE | _PROT_EXEC, allows=False),),
    "mprotect": (Condition(2, (_PROT_EXEC,), mask=_PROT_EXEC, allows=False),),
    "prlimit64": (Condition(0, (0,)),),  # its own limits
    "socket": _UNIX_ONLY,
    "socketpair": _UNIX_ONLY,
    "ioctl": (
        Condition(1, (_TIOCSTI, _TIOCLINUX), allows=False),
    ),  # keystrokes for the terminal it was started from
    "mount": (Condition(3, (0,), mask=_MS_EXISTING),),  # something new; no other name for what is mounted
}
# clone3 takes its flags in memory, where no filter sees them; the C library then uses clone. map_shadow_stack and mseal are
# attempts of a C library to be safer, which it gives up at ENOSYS.
_ABSENT: Final = _names("clone3 map_shadow_stack mseal")
_COMMON: Final = _MEMORY | _THREADS | _TIME | _WAITING | _KNOWING | _DESCRIPTORS

WORKER: Final = Profile(
    "worker",
    # capset, setfsuid, setfsgid: to create as the caller.
    _COMMON | _READING | _WRITING | _OWNING | _SERVING
    # setpriority: the end of a take-over.
    | _names("capset setfsuid setfsgid mount umount2 setpriority"),
    {
        **_CONDITIONS,
        # Of the calling thread alone, to a nice value of 0 to 31: it can be lowered, and never raised above the default.
        "setpriority": (Condition(0, (0,)), Condition(1, (0,)), Condition(2, (0,), mask=0xFFFFFFE0)),
    },
    _ABSENT,
)  # fmt: skip
"""Serves one root: every operation on files that a job may ask for, its control socket, mounting and unmounting."""

CAPTURE: Final = Profile(
    "capture",
    # sched_setscheduler: codec threads step behind all others. setpriority, ioprio_set: the work rises as its deadline nears
    # (precedence.py). chown: of what it makes in a repository of another user.
    _COMMON | _READING | _WRITING | _names("sched_setscheduler setpriority ioprio_set chown fchown fchownat"),
    _CONDITIONS,
    _ABSENT,
)
"""Reads backing directories and undo logs, writes the repository."""

UPKEEP: Final = CAPTURE._replace(name="upkeep")
"""Reads and writes the repository."""

RECEIVER: Final = Profile(
    "receiver",
    _COMMON - _names("pipe pipe2 prlimit64 pwrite64 pwritev pwritev2")
    | _ANSWERING
    | _names("ioctl accept accept4 socketpair openat getdents64 wait4 waitid pidfd_open pidfd_send_signal"),
    {
        **_CONDITIONS,
        # A process for each connection with descriptors, in no namespace of its own.
        "clone": (Condition(0, (0,), mask=_CLONE_NAMESPACES),),
        # /proc/self/fd and fdinfo: what descriptors there are, and whose process one refers to.
        "openat": (Condition(2, (0,), mask=_OPENED_TO_WRITE),),
        # On a descriptor of somebody else no request but those that the kernel answers for every descriptor.
        "ioctl": (Condition(1, (_FIOCLEX, _FIONCLEX, _FIONBIO, _FIONREAD, _TCGETS)),),
    },
    _ABSENT,
)
"""Owns a socket of strangers: it accepts, looks at what it was sent in a process of its own, passes it on or closes it. It reads, and
changes nothing that has a name."""


def limit_calls(profile: Profile) -> str:
    """Hold this process to the profile, for good. Call before threads are started, after privileges were given up.

    Returns:
        Why there is no filter; empty when it is in force. Without one the process is to go on.
    """
    try:
        seccomp.install(profile)
    except seccomp.Unavailable as error:
        return str(error)
    return ""


def limit_receiver() -> str:
    """Hold this process to what a receiver of descriptors needs; import everything before. Returns as `limit_calls`."""
    return limit_calls(RECEIVER)

"""System calls that each kind of process may make, and the function that installs the filter.

Guarantees: calls that a kind of process needs are listed, all others are refused with EPERM (seccomp.py). A process that cannot be
filtered goes on without a filter, because a job's file system and its snapshots are worth more. Every list is wider than what was
seen in the test suites (docs/system-calls.md): a C library may choose another call of the same sort. No list has a call that starts
a program, creates a process, reads another process, loads code into the kernel, changes a namespace or reaches a network.
"""

from __future__ import annotations

import os
from typing import Final

from ciuic.system import seccomp
from ciuic.system.seccomp import Condition, Profile

_AF_UNIX: Final = 1
_CLONE_THREAD: Final = 0x00010000
_PROT_WRITE, _PROT_EXEC = 2, 4
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOCLEX, _FIONCLEX, _FIONBIO, _FIONREAD = 0x5451, 0x5450, 0x5421, 0x541B
# Python's open() calls isatty(3) on what it has opened by name.
_TCGETS = 0x5401
# MS_REMOUNT, MS_BIND, MS_MOVE, MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE, MS_SHARED: what changes existing mounts.
_MS_EXISTING: Final = 1 << 5 | 1 << 12 | 1 << 13 | 1 << 17 | 1 << 18 | 1 << 19 | 1 << 20


# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_CLONE_NAMESPACES: Final = (
    0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
)
# O_TMPFILE contains O_DIRECTORY, with which a directory may be opened to be read.
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
    # Threads, never processes.
    "clone": (Condition(0, (_CLONE_THREAD,), mask=_CLONE_THREAD),),
    # Memory is writable or executable, never both and never one after the other: no code is generated at run time.
    "mmap": (Condition(2, (_PROT_WRITE | _PROT_EXEC,), mask=_PROT_WRITE | _PROT_EXEC, allows=False),),
    "mprotect": (Condition(2, (_PROT_EXEC,), mask=_PROT_EXEC, allows=False),),
    # Limits of the process itself.
    "prlimit64": (Condition(0, (0,)),),
    "socket": _UNIX_ONLY,
    "socketpair": _UNIX_ONLY,
    # No keystrokes into the terminal that the process was started from.
    "ioctl": (Condition(1, (_TIOCSTI, _TIOCLINUX), allows=False),),
    # New mounts only; no bind mount, remount or move of an existing one.
    "mount": (Condition(3, (0,), mask=_MS_EXISTING),),
}
# clone3 takes its flags in memory, where a filter cannot see them; after ENOSYS the C library uses clone. map_shadow_stack and mseal
# are hardening attempts of a C library, which it gives up after ENOSYS.
_ABSENT: Final = _names("clone3 map_shadow_stack mseal")
_COMMON: Final = _MEMORY | _THREADS | _TIME | _WAITING | _KNOWING | _DESCRIPTORS

WORKER: Final = Profile(
    "worker",
    # capset, setfsuid, setfsgid: files are created as the user of the request.
    _COMMON | _READING | _WRITING | _OWNING | _SERVING
    # setpriority: the end of a take-over.
    | _names("capset setfsuid setfsgid mount umount2 setpriority"),
    {
        **_CONDITIONS,
        # The calling thread alone, to a nice value of 0 to 31: its priority can be lowered, and never raised above the default.
        "setpriority": (Condition(0, (0,)), Condition(1, (0,)), Condition(2, (0,), mask=0xFFFFFFE0)),
    },
    _ABSENT,
)  # fmt: skip
"""Overlay worker of one root: every file operation that a job may request, its control socket, mounting and unmounting."""

CAPTURE: Final = Profile(
    "capture",
    # sched_setscheduler: codec threads run behind all others. setpriority, ioprio_set: the precedence rises as the deadline nears
    # (precedence.py). chown: files that it creates in a repository of another user.
    _COMMON | _READING | _WRITING | _names("sched_setscheduler setpriority ioprio_set chown fchown fchownat"),
    _CONDITIONS,
    _ABSENT,
)
"""Capture: reads backing directories and undo logs, writes the repository."""

UPKEEP: Final = CAPTURE._replace(name="upkeep")
"""Upkeep: reads and writes the repository."""

DRILL: Final = Profile(
    "drill",
    # Owners and attributes of what it restores; no special file is.
    _COMMON
    | _READING
    | _WRITING
    | (_OWNING - _names("mknod mknodat"))
    | _names("sched_setscheduler setpriority ioprio_set"),
    _CONDITIONS,
    _ABSENT,
)
"""Drill: reads the repository, restores into a scratch directory."""

READER: Final = Profile(
    "reader",
    # openat alone, whose flags are not in memory, where the filter cannot see them.
    _COMMON | _READING - _names("open openat2"),
    {**_CONDITIONS, "openat": (Condition(2, (0,), mask=_OPENED_TO_WRITE),)},
    _ABSENT,
)
"""Reader of a repository that judges checkpoints: it opens nothing to write, and changes no name and no attribute."""

PAGE: Final = READER._replace(
    name="page",
    allowed=READER.allowed | _ANSWERING | _names("socket socketpair accept accept4 connect"),
)
"""Process of the page of `ciuic web`: a reader that answers on sockets which it was given, and connects to Unix sockets alone."""

RECEIVER: Final = Profile(
    "receiver",
    # openat without openat2, whose flags are in memory, where the filter cannot see them.
    _COMMON - _names("pipe pipe2 prlimit64 pwrite64 pwritev pwritev2")
    | _ANSWERING
    | _names("ioctl accept accept4 socketpair openat getdents64 wait4 waitid pidfd_open pidfd_send_signal"),
    {
        **_CONDITIONS,
        # It forks a process for each connection with descriptors, without a namespace of its own.
        "clone": (Condition(0, (0,), mask=_CLONE_NAMESPACES),),
        # It reads /proc/self/fd and fdinfo: which descriptors it has, and to which process one refers.
        "openat": (Condition(2, (0,), mask=_OPENED_TO_WRITE),),
        # The descriptor may be another user's: only requests that the kernel answers for every descriptor.
        "ioctl": (Condition(1, (_FIOCLEX, _FIONCLEX, _FIONBIO, _FIONREAD, _TCGETS)),),
    },
    _ABSENT,
)
"""Receiver of a public socket: it accepts connections, examines messages in a process of its own, and forwards or closes them.

It reads, and changes no file.
"""


def limit_calls(profile: Profile) -> str:
    """Limit this process to the calls of the profile, for good. Call before threads are started, after privileges were dropped.

    Returns:
        The reason why there is no filter; empty when it is in force. The process should go on without one.
    """
    try:
        seccomp.install(profile)
    except seccomp.Unavailable as error:
        return str(error)
    return ""


def limit_receiver() -> str:
    """Limit this process to the calls of a receiver of descriptors; import everything before. Returns like `limit_calls`."""
    return limit_calls(RECEIVER)

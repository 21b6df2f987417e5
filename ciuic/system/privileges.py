"""Drop the privileges of a process for good, as soon as it is known which ones it needs, and limit what it may use up.

Guarantees: what `keep_only` has dropped does not come back, not even by setuid programs or file capabilities
(PR_SET_NO_NEW_PRIVS; the sets are permitted, effective, inheritable, ambient and, where that is allowed, bounding). A privilege that
is missing already is no error: in a container there is only less to drop. Capabilities belong to threads: call these functions
before any is started.

References:
    linux/capability.h, linux/prctl.h, capset(2), prctl(2), capabilities(7)
"""

from __future__ import annotations

import ctypes
import enum
import os
import pwd
import resource
import stat
from collections.abc import Iterable
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_PR_SET_KEEPCAPS: Final = 8
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_CLONE_NEWNET: Final = 0x40000000
_WORD_BITS: Final = 32


class Capability(enum.IntEnum):
    """Capabilities that a process of ciuic needs (linux/capability.h)."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    FSETID = 4
    SETGID = 6
    SETUID = 7
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    SYS_NICE = 23
    MKNOD = 27
    LEASE = 28
    SETFCAP = 31
    MAC_OVERRIDE = 32
    MAC_ADMIN = 33


OVERLAY_WORKER: Final = frozenset(
    {
        Capability.CHOWN,
        Capability.DAC_OVERRIDE,
        Capability.DAC_READ_SEARCH,
        Capability.FOWNER,
        Capability.FSETID,
        Capability.SETGID,
        Capability.SETUID,
        Capability.SYS_ADMIN,
        Capability.MKNOD,
        Capability.LEASE,
        Capability.SETFCAP,
        Capability.MAC_OVERRIDE,
        Capability.MAC_ADMIN,
    }
)
"""Capabilities of an overlay worker; docs/security.md has a reason for each."""

CAPTURE: Final = frozenset(
    {Capability.DAC_READ_SEARCH, Capability.FOWNER, Capability.SYS_ADMIN, Capability.SYS_PTRACE}
)
"""Capabilities of a capture: it reads files of all users without changing access times, trusted.* attributes, and the worker's
descriptors."""

DRILL: Final = frozenset(
    {Capability.CHOWN, Capability.DAC_OVERRIDE, Capability.DAC_READ_SEARCH, Capability.FOWNER}
)
"""Capabilities of a drill: it gives restored files their recorded owners, modes and times, and reads them back."""

UPKEEP: Final = frozenset({Capability.DAC_READ_SEARCH})
"""Capability of upkeep: it reaches the repository through directories of other users."""

READER: Final = frozenset({Capability.DAC_READ_SEARCH})
"""Capability of a process that reads a repository and writes nothing."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Word(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_Sets = _Word * 2
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def permitted() -> frozenset[int]:
    """Return the numbers of the capabilities that the calling thread may use."""
    return frozenset(
        index * _WORD_BITS + bit
        for index, word in enumerate(_read())
        for bit in range(_WORD_BITS)
        if word.permitted >> bit & 1
    )


def keep_only(wanted: Iterable[int]) -> frozenset[int]:
    """Drop all other capabilities for good; return the wanted ones that the process had. OSError if the kernel refuses."""
    kept = permitted() & frozenset(wanted)
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # Needs CAP_SETPCAP, which a service may lack, and which capset(2) below takes away. Without it,
    # no_new_privs alone keeps programs from regaining capabilities.
    for number in range(_last_capability() + 1):
        if number not in kept:
            _prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _write(kept)
    return kept


def become(uid: int, gid: int) -> None:
    """Become another user for good, without other groups; the capabilities stay permitted until `keep_only`. OSError.

    Call before any thread is started.
    """
    _check(_prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_KEEPCAPS, 0, 0, 0, 0)
    # The kernel has emptied the effective set, without which `keep_only` cannot drop the bounding set.
    _write(permitted())


def unprivileged_user() -> tuple[int, int] | None:
    """Return user and group of nobody, for `become`; None where this process is no root's, and stays what it is."""
    if os.geteuid() != 0:
        return None
    try:
        found = pwd.getpwnam("nobody")
    except KeyError:
        return 65534, 65534
    return found.pw_uid, found.pw_gid


def limit_capture(repository: str) -> frozenset[int]:
    """Limit the calling process to what a capture into ``repository`` needs; return the remaining capabilities."""
    has = permitted()
    # A capture opens /proc/<worker>/fd, which takes CAP_SYS_PTRACE or at least the capabilities of the worker.
    wanted = CAPTURE if Capability.SYS_PTRACE in has else has
    # Before the capabilities are dropped: a namespace takes CAP_SYS_ADMIN.
    leave_network()
    no_core_dumps()
    return keep_only(wanted | _to_write(repository))


def limit_upkeep(repository: str) -> frozenset[int]:
    """Limit the calling process to what removing snapshots from ``repository`` needs; return the remaining capabilities."""
    leave_network()
    no_core_dumps()
    return keep_only(UPKEEP | _to_write(repository))


def limit_drill() -> frozenset[int]:
    """Limit the calling process to what a restore into a scratch directory needs; return the remaining capabilities."""
    leave_network()
    no_core_dumps()
    return keep_only(DRILL)


def limit_reader() -> frozenset[int]:
    """Limit the calling process to what reading a repository needs; return the remaining capabilities."""
    leave_network()
    no_core_dumps()
    return keep_only(READER)


def limit_sender(memory_bytes: int) -> frozenset[int]:
    """Limit the calling process, which talks to strangers over a network; return the remaining capabilities. OSError.

    Root's becomes nobody where it may. It keeps the capability to read: its libraries may lie where only root looks.

    Args:
        memory_bytes: private writable memory.
    """
    limit_resources(memory_bytes, None)
    user = unprivileged_user()
    if user is not None and {Capability.SETUID, Capability.SETGID} <= permitted():
        become(*user)
    no_core_dumps()
    return keep_only(READER)


def may_trace() -> bool:
    """Return whether this process and its children can open /proc/<pid>/fd of a process that is not dumpable."""
    return Capability.SYS_PTRACE in permitted()


def limit_worker(*, captures_trace: bool) -> frozenset[int]:
    """Limit the calling process to what an overlay worker needs. Call after raising limits, which takes CAP_SYS_RESOURCE.

    Args:
        captures_trace: captures have CAP_SYS_PTRACE. If not, the process stays dumpable: a capture, which has no more
            privileges than the worker, could not reach the worker's descriptors otherwise.
    """
    if captures_trace:
        no_core_dumps()
    return keep_only(OVERLAY_WORKER)


def limit_receiver() -> frozenset[int]:
    """Limit the calling process to what the receiver of a public socket needs: no capability. Call after it listens."""
    leave_network()
    no_core_dumps()
    return keep_only(())


def _to_write(repository: str) -> frozenset[int]:
    """Return CAP_DAC_OVERRIDE, unless this user owns the repository and its entries and may write them."""
    try:
        with os.scandir(repository) as entries:
            facts = [os.stat(repository), *(entry.stat(follow_symlinks=False) for entry in entries)]
    except OSError:
        # Opening the repository reports the same error.
        facts = []
    ours = bool(facts) and all(st.st_uid == os.geteuid() and st.st_mode & stat.S_IWUSR for st in facts)
    return frozenset() if ours else frozenset({Capability.DAC_OVERRIDE})


def no_core_dumps() -> None:
    """Keep the memory of this process (files of all users, the seed of the repository) out of core files."""
    # RLIMIT_CORE alone does not bind handlers that the kernel pipes the dump to, so the process is made not dumpable. That also
    # closes /proc/<pid>/fd, mem and environ to processes without CAP_SYS_PTRACE.
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def no_core_files() -> None:
    """Keep the memory of this process (keys of a remote) out of core files, where a process that is not dumpable could do too little."""
    # 1 byte: the kernel then also starts no handler of dumps, which 0 does not forbid (core(5), do_coredump in fs/coredump.c).
    # The soft limit alone, which a program that is started from here can raise.
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))


def leave_network() -> int:
    """Enter an empty network namespace; return 0, or the errno (it takes CAP_SYS_ADMIN, and no filter or limit against it)."""
    return ctypes.get_errno() if _libc.unshare(_CLONE_NEWNET) else 0


def _read() -> ctypes.Array[_Word]:
    sets = _Sets()
    _check(_libc.capget(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), sets))
    return sets


def _write(wanted: Iterable[int]) -> None:
    """Make these capabilities permitted and effective, and none inheritable; OSError if the thread may not have them."""
    sets = _Sets()
    for number in wanted:
        word = sets[number // _WORD_BITS]
        word.permitted |= 1 << number % _WORD_BITS
        word.effective = word.permitted
    _check(_libc.capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), sets))


def _last_capability() -> int:
    try:
        with open("/proc/sys/kernel/cap_last_cap") as file:
            return int(file.read())
    except (OSError, ValueError):
        # Without /proc every bit of both words is tried; the kernel refuses numbers that it does not have.
        return 2 * _WORD_BITS - 1


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def limit_resources(memory_bytes: int, processor_seconds: int | None) -> None:
    """Limit the private memory and the processor time of the calling process, and of processes that it starts, for good.

    Past the first an allocation fails; past the second SIGXCPU ends the process, without a core file.

    Args:
        memory_bytes: Private writable memory. Address space would be the wrong measure: libraries reserve far more than they use.
        processor_seconds: Processor time of each process, all threads together; None for one that serves for as long as it is wanted.
    """
    _lower(resource.RLIMIT_DATA, memory_bytes)
    # At the hard limit the kernel kills, at the soft one it says why.
    if processor_seconds is not None:
        _lower(resource.RLIMIT_CPU, processor_seconds, 1)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, limit: int, reserve: int = 0) -> None:
    """Set both limits, the hard one to ``reserve`` more; limits that are lower already stay."""
    _, hard = resource.getrlimit(kind)
    upper = limit + reserve if hard == resource.RLIM_INFINITY else min(limit + reserve, hard)
    resource.setrlimit(kind, (max(0, upper - reserve), upper))

"""System call filters: compile a list of allowed calls to seccomp programs and install them for the process, for good.

Guarantees: an allowed call behaves as without the filter. A call that the profile does not name fails with EPERM, and the kernel
writes a line to its log (type=1326, with the number of the call). A call newer than `syscall_numbers` fails with ENOSYS and without
a line, so that a C library newer than this table uses the older call instead. No call ends the process: a filter that is too narrow
costs one operation, never the job's file system. profiles.py lists the calls of each kind of process.

A profile becomes two programs, because the kernel logs either all refusals of a program or none: the first answers ENOSYS to calls
that a C library tries routinely (clone3, for each thread), the second refuses. Each is classic BPF: a binary search over runs of call
numbers, seven comparisons for 300 calls. Linux 5.11 and later evaluate them once for each call whose arguments are not examined, and
then answer from a bitmap.

References: seccomp(2), linux/filter.h, linux/seccomp.h, linux/audit.h, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ciuic.system.sandbox.syscall_numbers import LAST_NUMBER, NUMBERS

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
        raise Unavailable(f"the kernel refuses the system call filter: {os.strerror(ctypes.get_errno())}")


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

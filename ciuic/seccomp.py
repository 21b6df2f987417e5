"""System call filters: a list of allowed calls becomes a seccomp program that holds for the process, for good.

Guarantees: an allowed call behaves as without the filter; a call that the profile does not name fails with EPERM, and the
kernel writes a line to its log (type=1326, with the number of the call); a call newer than `syscall_numbers` fails with
ENOSYS and no line, so that a C library newer than this table takes the older call instead. No call ends the process: a filter that is
too narrow costs one operation, never the job's file system. Leaves to others: which calls a kind of process needs
(seccomp_profiles.py).

A profile becomes two programs, because the kernel logs the refusals of a program or does not: the first answers ENOSYS to
calls that a C library tries in passing (clone3, for each thread), the second refuses. Each is classic BPF: a binary search
over runs of call numbers, seven comparisons for 300 calls. Linux 5.11 and later evaluate them once for each call whose
arguments are not looked at, and then answer from a bitmap.

References: seccomp(2), linux/filter.h, linux/seccomp.h, linux/audit.h, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ciuic.syscall_numbers import LAST_NUMBER, NUMBERS

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
_FLAG_TSYNC: Final = 1  # every thread of the process
_FLAG_LOG: Final = 2  # refusals go to the kernel's log (4.14)
# Before 5.16 a filter switched the mitigation of speculative store bypass on, which slows all of the process down. It guards
# against code of others in the same process; ours runs none.
_FLAG_SPEC_ALLOW: Final = 4
_PR_GET_NO_NEW_PRIVS: Final = 39


class _Architecture(NamedTuple):
    column: int
    """In `NUMBERS`."""
    audit: int
    """AUDIT_ARCH_…: system calls of 32-bit programs, with other numbers, have another."""
    seccomp: int
    """Number of seccomp(2)."""


_ARCHITECTURES: Final = {
    "x86_64": _Architecture(0, 0xC000003E, 317),
    "aarch64": _Architecture(1, 0xC00000B7, 277),
}

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Unavailable(Exception):
    """This machine or this process cannot have a filter; the message says why."""


class Condition(NamedTuple):
    """A test of the low 32 bits of one argument, which decides whether the call is allowed."""

    argument: int
    values: tuple[int, ...]
    mask: int | None = None
    allows: bool = True
    """Whether a match allows the call, or refuses it."""


class Profile(NamedTuple):
    """What one kind of process may call."""

    name: str
    allowed: frozenset[str]
    conditions: Mapping[str, tuple[Condition, ...]] = {}
    """For allowed calls: all of them must agree."""
    absent: frozenset[str] = frozenset()
    """Calls that fail with ENOSYS: the C library has another way, whose arguments a filter can see."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def machine() -> str:
    """Name of the architecture in `_ARCHITECTURES`, or another name where filters are not supported."""
    wide = struct.calcsize("P") == 8  # a 32-bit interpreter on a 64-bit kernel has other numbers
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
    # Numbers beyond the table; x32 calls, which have bit 30 set in theirs, are among them.
    return _program([*absent, _NOT_THERE], architecture), _program([*refused, _ALLOWED], architecture)


def install(profile: Profile) -> None:
    """Filter the calls of this process, of its threads and of all that it starts.

    Needs no_new_privs, which `privileges.keep_only` sets: without it the kernel takes a filter from CAP_SYS_ADMIN alone, and
    a setuid program would run under it.

    Raises:
        Unavailable: The architecture is not supported, no_new_privs is not set, or the kernel refuses.
    """
    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise Unavailable("a filter of system calls needs no_new_privs, which is not set")
    absent, refused = assemble(profile, machine())
    _load_program(absent, (_FLAG_TSYNC | _FLAG_SPEC_ALLOW, _FLAG_TSYNC))
    logged = _FLAG_TSYNC | _FLAG_LOG
    _load_program(refused, (logged | _FLAG_SPEC_ALLOW, logged, _FLAG_TSYNC))


def _load_program(code: bytes, flag_choices: Sequence[int]) -> None:
    program = _Program(len(code) // _INSTRUCTION.size, code)
    number = _architecture(machine()).seccomp
    result = -1
    for flags in flag_choices:  # older kernels answer EINVAL to flags that they do not know
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
        raise Unavailable(f"the kernel takes no filter of system calls: {os.strerror(ctypes.get_errno())}")


def offered() -> str:
    """Why this machine cannot filter system calls; empty where it can. Changes nothing."""
    try:
        number = _architecture(machine()).seccomp
    except Unavailable as error:
        return str(error)
    action = ctypes.c_uint32(_REFUSE & 0xFFFF0000)
    if _syscall(ctypes.c_long(number), ctypes.c_uint(_GET_ACTION_AVAIL), 0, ctypes.byref(action)) != 0:
        return f"the kernel has no filters of system calls: {os.strerror(ctypes.get_errno())}"
    return ""


def _architecture(machine: str) -> _Architecture:
    if machine not in _ARCHITECTURES:
        raise Unavailable(
            f"filters of system calls are built for {', '.join(_ARCHITECTURES)}, not for {machine}"
        )
    return _ARCHITECTURES[machine]


def _program(actions: Sequence[tuple[bytes, ...]], architecture: _Architecture) -> bytes:
    """Instructions that carry out ``actions[number]``, and the last one for all numbers beyond."""
    runs: list[tuple[int, tuple[bytes, ...]]] = []
    for number, action in enumerate(actions):
        if not runs or runs[-1][1] != action:
            runs.append((number, action))
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
            # A match jumps over the other comparisons, and over the RETURN where a match is what allows.
            code.append(_INSTRUCTION.pack(_JUMP_EQUAL, left + (1 if condition.allows else 0), 0, value))
        if not condition.allows:
            code[-1] = _INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, condition.values[-1])
        code.append(_return(_REFUSE))
    return (*code, *_ALLOWED)


def _search(runs: Sequence[tuple[int, tuple[bytes, ...]]]) -> list[bytes]:
    """Binary search for the run that holds the accumulator; each run ends the program."""
    if len(runs) == 1:
        return list(runs[0][1])
    middle = len(runs) // 2
    below, above = _search(runs[:middle]), _search(runs[middle:])
    start = runs[middle][0]
    if len(below) <= _MAX_CONDITIONAL_JUMP:
        return [_INSTRUCTION.pack(_JUMP_AT_LEAST, len(below), 0, start), *below, *above]
    far = _INSTRUCTION.pack(_JUMP, 0, 0, len(below))
    return [_INSTRUCTION.pack(_JUMP_AT_LEAST, 0, 1, start), far, *below, *above]


def _load(offset: int) -> bytes:
    return _INSTRUCTION.pack(_LOAD_WORD, 0, 0, offset)


def _return(action: int) -> bytes:
    return _INSTRUCTION.pack(_RETURN, 0, 0, action)


_ALLOWED: Final = (_return(_ALLOW),)
_REFUSED: Final = (_return(_REFUSE),)
_NOT_THERE: Final = (_return(_UNKNOWN),)

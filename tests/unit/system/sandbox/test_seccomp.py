"""Tests of system call filters as programs: their answer to every call number, for both architectures."""

from __future__ import annotations

import errno
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from support.ci import needs

from ciuic.cli import doctor_checks as doctor_machine
from ciuic.system.seccomp import LAST_NUMBER, NUMBERS, Condition, Profile, Unavailable, assemble, install
from ciuic.system.syscall_profiles import CAPTURE, DRILL, READER, RECEIVER, UPKEEP, WORKER

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
PROFILES = (WORKER, CAPTURE, UPKEEP, DRILL, READER, RECEIVER)
NEVER = (
    "execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "bpf", "perf_event_open",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "userfaultfd", "add_key", "keyctl", "request_key", "setns", "unshare", "personality", "reboot",
    "swapon", "swapoff", "iopl", "ioperm", "open_by_handle_at", "pivot_root", "chroot", "move_mount", "open_tree", "fsmount",
    "setuid", "setgid", "setresuid", "setresgid", "setgroups", "acct", "quotactl", "syslog", "settimeofday", "clock_settime",
    "sethostname", "kcmp", "pidfd_getfd", "pidfd_send_signal", "kill", "seccomp",
)  # fmt: skip


def run(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """Interpret a classic BPF program as the kernel does (linux/filter.h); return its answer."""
    data = struct.pack("<IIQ6Q", number, machine, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x54:
                accumulator &= k
            case 0x05:
                at += k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x35:
                at += if_true if accumulator >= k else if_false
            case 0x06:
                return int(k)
            case _:
                raise AssertionError(f"operation {operation:#x}")


def answer(profile: Profile, machine: str, number: int, *arguments: int) -> int:
    """Return the stricter answer of both programs, as seccomp(2) combines them."""
    audit = MACHINES[machine][1]
    return min(run(program, audit, number, *arguments) for program in assemble(profile, machine))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_number_gets_the_answer_of_its_name(profile: Profile, machine: str) -> None:
    """Calls named in the profile are allowed, optional ones of a C library get ENOSYS, others are refused."""
    column = MACHINES[machine][0]
    names = {numbers[column]: name for name, numbers in NUMBERS.items() if numbers[column] is not None}
    for number in range(LAST_NUMBER + 1):
        name = names.get(number, "")
        if name in profile.conditions and name in profile.allowed:
            continue
        expected = ALLOW if name in profile.allowed else ENOSYS if name in profile.absent else EPERM
        assert answer(profile, machine, number) == expected, (number, name)
    for number in (LAST_NUMBER + 1, LAST_NUMBER + 2, 1000, 0x40000000, 0x40000001, 0xFFFFFFFF):
        assert answer(profile, machine, number) == ENOSYS, hex(number)


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_a_call_serves_two_ends(machine: str) -> None:
    """Threads, unix sockets and new mounts are allowed by arguments; processes and run-time code are not."""

    def decision(profile: Profile, name: str, *arguments: int) -> int:
        number = NUMBERS[name][MACHINES[machine][0]]
        assert number is not None
        return answer(profile, machine, number, *arguments)

    for name, good, bad in (
        ("clone", (0x3D0F00,), (0x1200011,)),
        ("socket", (1, 1), (2, 1)),
        ("socketpair", (1, 5), (16, 3)),
        ("mmap", (0, 4096, 5), (0, 4096, 7)),
        ("mmap", (0, 4096, 3), (0, 4096, 6)),
        ("mprotect", (0, 4096, 3), (0, 4096, 5)),
        ("prlimit64", (0, 7), (1, 7)),
        ("setpriority", (0, 0, 0), (0, 0, (1 << 64) - 1)),
        ("setpriority", (0, 0, 19), (0, 0, (1 << 32) - 10)),
        ("setpriority", (0, 0, 5), (0, 1, 5)),
        ("setpriority", (0, 0, 5), (2, 0, 5)),
        ("ioctl", (3, 0x40049409), (0, 0x5412)),
        ("ioctl", (3, 0x5421), (0, 0x541C)),
        ("mount", (0, 0, 0, 1 << 16 | 7), (0, 0, 0, 1 << 12)),
        ("mount", (0, 0, 0, 0), (0, 0, 0, 1 << 18 | 1 << 14)),
    ):
        assert decision(WORKER, name, *good) == ALLOW, (name, good)
        assert decision(WORKER, name, *bad) == EPERM, (name, bad)
    assert decision(CAPTURE, "mount", 0, 0, 0, 0) == EPERM
    assert (decision(RECEIVER, "ioctl", 3, 0x5451), decision(RECEIVER, "ioctl", 3, 0x40049409)) == (
        ALLOW,
        EPERM,
    )


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_profiles_allow_no_unused_calls(profile: Profile) -> None:
    """Calls to run programs, access processes, or change kernel, namespaces, keys or ids are not allowed."""
    # A receiver ends the processes that it forked, by descriptors of theirs.
    own = {"pidfd_send_signal"} if profile is RECEIVER else set()
    assert profile.allowed & set(NEVER) == own
    assert profile.allowed | profile.absent <= NUMBERS.keys()
    assert profile.allowed.isdisjoint(profile.absent)


def test_calls_of_another_architecture_are_refused() -> None:
    """Calls by the numbers of a 32-bit program are all refused."""
    for program in assemble(WORKER, "x86_64"):
        assert run(program, 0x40000003, NUMBERS["read"][0] or 0) == EPERM


def test_a_tree_too_long_for_its_jumps_still_decides() -> None:
    """A branch of more than 255 instructions is skipped with a long jump, and gives the right answer."""
    many = Condition(0, tuple(range(1, 100)))
    names = ("read", "write", "open", "close", "stat", "fstat")
    profile = Profile("long", frozenset(names), dict.fromkeys(names, (many, many)))
    for name in names:
        number = NUMBERS[name][0]
        assert number is not None
        assert (answer(profile, "x86_64", number, 50), answer(profile, "x86_64", number, 100)) == (
            ALLOW,
            EPERM,
        )
    assert answer(profile, "x86_64", LAST_NUMBER) == EPERM


def test_a_foreign_machine_and_a_process_that_may_gain_privileges_are_named() -> None:
    """A missing architecture or no_new_privs is an error that says so, and no filter is set."""
    with pytest.raises(Unavailable, match="not for riscv64"):
        assemble(WORKER, "riscv64")
    with pytest.raises(Unavailable, match="no_new_privs"):
        # A test process has not given up privileges that it may gain.
        install(WORKER)


def test_the_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    """Each call in the machine's kernel headers has the table's number, on both architectures."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    needs("" if compiler and Path("/usr/include/asm-generic/unistd.h").exists() else "no kernel headers here")
    # Definitions of asm/unistd.h of arm64.
    wants = ("RENAMEAT", "NEW_STAT", "SET_GET_RLIMIT", "SYS_CLONE3", "MEMFD_SECRET")
    generic = "".join(f"#define __ARCH_WANT_{want}\n" for want in wants) + "#include <asm-generic/unistd.h>\n"
    sources = [(1, generic)]
    if list(Path("/usr/include").glob("*/asm/unistd_64.h")):
        sources.append((0, "#include <asm/unistd_64.h>\n"))
    for column, source in sources:
        done = subprocess.run(
            [str(compiler), "-E", "-dM", "-D__BITS_PER_LONG=64", "-"], input=source, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        defined = dict(re.findall(r"#define (__NR\w*) (\w+)", done.stdout))
        for key, value in defined.items():
            name = key.removeprefix("__NR_")
            while value in defined:
                value = defined[value]
            if name in NUMBERS and name != key:
                assert NUMBERS[name][column] == int(value), name
        assert len(defined) > 300


def test_doctor_says_whether_calls_are_filtered() -> None:
    """Doctor warns of a machine that cannot filter calls, and of a worker without filter on one that can."""
    (lacking,) = doctor_machine.system_calls([], lambda: "the kernel has none")
    assert (lacking.level, "the kernel has none" in lacking.message) == ("warning", True)
    warned, fine = doctor_machine.system_calls(["/root/a"], lambda: "")
    assert (warned.level, "/root/a" in warned.message, fine.level) == ("warning", True, "ok")

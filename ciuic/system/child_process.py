"""Command lines and environments of the interpreters and programs that ciuic starts.

A new interpreter imports modules from its current directory and from directories that its environment names before it runs a line of
ciuic. A process of root must not take either from its caller.

Guarantees: an interpreter started with `module_command` and `environment` imports this very package, whatever its current directory
is, and never looks for a module in the current directory. Where this process is privileged (effective user root, or another than its
real user), the child runs in isolated mode, has an environment of known variables only, and gets those entries of the import path
that no other user may write to. An ordinary user's child has the import path and environment of its parent: that user owns both, and
its packages may be found in no other way (docs/decisions/children.md). A forked child shows the command line of what it runs.

This module is the only one that starts ``sys.executable``; `tests/security/test_environment.py` holds that.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ciuic.system.ownership import find_flaw

_KEYCTL: Final = {"x86_64": 250, "aarch64": 219}
"""Number of the system call."""
_JOIN_SESSION_KEYRING: Final = 1
# Of variables that root may have and another user must not see.
_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASS|CREDENTIAL|KEY|AUTH|^(AWS|AZURE|GOOGLE|DBUS)_|^XDG_RUNTIME_DIR$", re.IGNORECASE
)
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/wrappers/bin:/run/current-system/sw/bin"
"""PATH of privileged processes. The last two directories are those of NixOS."""
_IMPORT_PATH: Final = "CIUIC_IMPORT_PATH"
"""Variable that carries the import path. PYTHONPATH would not do: isolated mode ignores it."""
_BOOTSTRAP: Final = (
    "import sys;"
    "sys.modules['rich']=None;"
    "from os import environ;"
    "own=sys.path[:];"
    f"sys.path[:]=environ.pop({_IMPORT_PATH!r}).split(':');"
    "sys.path+=[p for p in own if p and p not in sys.path]if sys.flags.isolated else[];"
    "from runpy import run_module;"
    "del sys.argv[1];"
    "run_module(sys.argv.pop(1),run_name='__main__',alter_sys=True)"
)
"""Program that sets the import path before the first import that is not loaded already.

What the isolated interpreter has found by itself (its own site-packages, .pth files) goes behind the given entries, so that it can
hide nothing. rich is hidden: structlog imports it wherever it is installed, and no child prints for a person (5 MB of the memory of
each, and half of the time until it works).
"""
_OWN_VARIABLES: Final = frozenset(
    {"CIUIC_CONFIG", "CIUIC_REPO", "CIUIC_UPLOAD_STATE", "CIUIC_WITHOUT_PASSTHROUGH"}
)
"""Variables of ciuic that processes of ciuic read. The passphrases and keys of remotes (CIUIC_REMOTE_*) are not among them: who starts a
process that opens a remote passes them on (training/remote/uploads.py)."""
_SAFE_VARIABLES: Final = frozenset(
    {
        "HOME",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LANG",
        "LANGUAGE",
        "LOGNAME",
        "MALLOC_ARENA_MAX",
        "NO_COLOR",
        "TERM",
        "TZ",
        "USER",
    }
)
"""Variables that a privileged child keeps, besides those of ciuic and LC_*.

The list names harmless variables, not dangerous ones: a list of dangerous ones would lack the next hook that a C library or an
interpreter introduces.
"""
_HOOKS: Final = frozenset({"PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT", "BASH_ENV", "ENV"})
"""Variables that an ordinary user's child does not get: they are meant for interactive programs."""


def is_privileged() -> bool:
    """Return whether this process may do more than the user who chose its environment and current directory."""
    return os.geteuid() == 0 or os.geteuid() != os.getuid() or os.getegid() != os.getgid()


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` as a program in a new interpreter.

    Must be started with `environment`, and with ``cwd`` set to a directory of ciuic.
    """
    # "-m MODULE" is not read by the interpreter: it is there for operators who look at the list of processes.
    # `-I` ignores PYTHON* variables and the user site, by which alone an ordinary user's packages may be
    # found. The child of such a user leaves out the current directory only: by `-P` from Python 3.11 on, and
    # by the bootstrap, which sets the import path before it imports a module that is not loaded.
    flags = ["-I"] if is_privileged() else ["-P"] if sys.version_info >= (3, 11) else []
    flags += ["-B"] if sys.dont_write_bytecode else []
    return [interpreter(), *flags, "-c", _BOOTSTRAP, "-m", module, *arguments]


def script_command(path: str, *arguments: str) -> list[str]:
    """Return the command line that runs a file of ciuic that imports the standard library alone."""
    # `-S`: nothing in it is imported from site-packages, whose .pth files would run first. Each cut waits for
    # such a script.
    return [interpreter(), "-I", "-S", path, *arguments]


def interpreter() -> str:
    """Return the interpreter that runs this process."""
    # sys.executable is empty where Python is embedded in another program.
    return sys.executable or "python3"


def environment(ours: Mapping[str, str] | None = None, *, of_trainer: bool = False) -> dict[str, str]:
    """Return the environment of an interpreter started with `module_command`, derived from this process's or from ``ours``."""
    found = program_environment(ours)
    found[_IMPORT_PATH] = ":".join(import_path(of_trainer=of_trainer))
    return found


def program_environment(ours: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program that is not started by `module_command`."""
    ours = os.environ if ours is None else ours
    if not is_privileged():
        return {name: value for name, value in ours.items() if name not in _HOOKS and _is_passed_on(name)}
    found = {
        name: value
        for name, value in ours.items()
        if name in _SAFE_VARIABLES or name in _OWN_VARIABLES or name.startswith("LC_")
    }
    found["PATH"] = SYSTEM_PATH
    # An interpreter of a module system or of conda may need LD_LIBRARY_PATH to start at all. The same rule as for the import path.
    libraries = [entry for entry in ours.get("LD_LIBRARY_PATH", "").split(":") if _is_safe_entry(entry)]
    if libraries:
        found["LD_LIBRARY_PATH"] = ":".join(libraries)
    return found


def _is_passed_on(name: str) -> bool:
    """Return whether a child needs a variable, if it is one of ciuic."""
    return not name.startswith("CIUIC_") or name in _OWN_VARIABLES


def without_secrets(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program of the user's that is started as the user would: all but the secrets of remotes."""
    return {name: value for name, value in ours.items() if not name.startswith("CIUIC_REMOTE_")}


def as_user(
    command: Sequence[str], ours: Mapping[str, str], uid: int, gid: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment that run a command with a user's rights alone (setpriv(1)). Needs root.

    It ends with the thread that starts it, has no capability and can gain none, also not by setuid programs, and no variable whose name says that it is a secret.
    """
    try:
        known = pwd.getpwuid(uid)
        name, home, groups = known.pw_name, known.pw_dir, "--init-groups"
    except KeyError:
        name, home, groups = str(uid), "/", "--clear-groups"
    argv = [
        *(find_program("setpriv"), f"--reuid={uid}", f"--regid={gid}", groups),
        *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--pdeathsig=KILL", "--", *command),
    ]
    kept = {name: value for name, value in ours.items() if not _SECRET_NAME.search(name)}
    return argv, {**kept, "HOME": home, "USER": name, "LOGNAME": name}


def leave_keyring() -> Callable[[], object]:
    """Return what a child calls before it runs a program: the keys of this session are none of its own then (keyctl(2))."""
    number = _KEYCTL.get(os.uname().machine)
    # Loaded here: between fork and exec nothing may be imported.
    syscall = ctypes.CDLL(None).syscall
    return (lambda: None) if number is None else lambda: syscall(number, _JOIN_SESSION_KEYRING, None)


def import_path(entries: Sequence[object] | None = None, *, of_trainer: bool = False) -> list[str]:
    """Return the entries of ``sys.path`` (or ``entries``) that a child may have, and this package's directory in any case.

    Relative entries would mean the current directory of each process, and are left out. An entry with a colon cannot be passed on,
    as in PYTHONPATH.

    Args:
        entries: import path instead of ``sys.path``.
        of_trainer: this process is a training, which has imported from all entries already. Its snapshots depend on packages in
            directories of other users, such as a volume of its container. Of the entries that others may write, only the current
            directory is left out.
    """
    found = [
        entry
        for entry in (sys.path if entries is None else entries)
        if isinstance(entry, str) and entry.startswith("/") and ":" not in entry
    ]
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if is_privileged():
        # The interpreter's own directories come from its installation; all others may come from its environment.
        # A prefix of / would make every absolute entry one of its own.
        own = tuple(
            f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix} if prefix != "/"
        )
        here = _current_directory()
        found = [
            entry
            for entry in found
            if entry == home
            or entry.startswith(own)
            or (of_trainer and os.path.realpath(entry) != here)
            or _is_safe_entry(entry)
        ]
    if home in found:
        return found
    # This process runs from it already. A site-packages must hide no standard module; a checkout must not be hidden by an
    # installed package.
    last = os.path.basename(home) in ("site-packages", "dist-packages")
    return [*found, home] if last else [home, *found]


def find_program(name: str) -> str:
    """Return the absolute path of a system program such as systemctl; ``name`` itself where there is none.

    A privileged process searches `SYSTEM_PATH` alone, any other its PATH.
    """
    if "/" in name:
        return name
    # An absolute path even where the program is missing: a bare name would be searched for in the caller's
    # PATH.
    return shutil.which(name, path=SYSTEM_PATH if is_privileged() else None) or (
        f"/usr/bin/{name}" if is_privileged() else name
    )


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        # It was removed: nothing can be imported from it.
        return ""


def _is_safe_entry(entry: str) -> bool:
    """Return whether no user but root and this one may put a file there."""
    if not entry.startswith("/") or not os.path.exists(entry):
        return False
    try:
        return find_flaw(entry) is None
    except OSError:
        return False


def rename_process(module: str, *words: str) -> None:
    """Show this process in the list of processes as ``python -m module words``, for people and their scripts.

    A forked process would be listed under the name of the one that forked it. The kernel shows as the command
    line (proc_pid_cmdline(5)) memory of the process itself, whose place and size are fields 48 and 49 of
    proc_pid_stat(5): it can be overwritten, and not made longer. A longer name is not shown.
    """
    # Only here: processes that start others need no ctypes.
    import ctypes

    shown = b"\0".join(map(os.fsencode, [interpreter(), "-m", module, *words]))
    try:
        # Field 2 is the program's name, which may contain blanks and parentheses: count from its last
        # parenthesis.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end - len(shown):
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)

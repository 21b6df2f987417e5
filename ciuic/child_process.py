"""Command lines and environments of the interpreters and programs that this package starts.

A new interpreter imports what is in its current directory and in the directories that its environment names before it runs a line
of ours. A process of root must not take either from its caller.

Guarantees: an interpreter started with `module_command` and `environment` imports this very package, whatever its current directory
is, and never looks for a module in the current directory. Where this process is privileged (effective user root, or another
than its real user) the child runs in isolated mode, has an environment of known variables only, and is given those entries of our
import path that nobody else may write to. An ordinary user's child has the import path and environment of its parent: that
user owns both, and its packages may be found in no other way (docs/decisions/children.md).

This module is the only one that starts ``sys.executable``; `tests/security/test_environment.py` holds that.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from ciuic.ownership import find_flaw

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/wrappers/bin:/run/current-system/sw/bin"
"""Where a privileged process looks for programs. The last two are NixOS's."""
_IMPORT_PATH: Final = "CIUIC_IMPORT_PATH"
"""The variable that carries the import path. Not PYTHONPATH: isolated mode ignores it."""
_BOOTSTRAP: Final = (
    "import sys;"
    "from os import environ;"
    "own=sys.path[:];"
    f"sys.path[:]=environ.pop({_IMPORT_PATH!r}).split(':');"
    "sys.path+=[p for p in own if p and p not in sys.path]if sys.flags.isolated else[];"
    "from runpy import run_module;"
    "del sys.argv[1];"
    "run_module(sys.argv.pop(1),run_name='__main__',alter_sys=True)"
)
"""The import path comes before the first import that is not loaded already. What the isolated interpreter has found by itself
(its own site-packages, .pth files) goes behind what it is given, so that it can hide nothing."""
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
"""What a privileged child keeps of its environment, with CIUIC_* and LC_*. A list of what is harmless cannot lack the next hook
that a C library or an interpreter invents, as a list of what is dangerous can."""
_HOOKS: Final = frozenset({"PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT", "BASH_ENV", "ENV"})
"""What an ordinary user's child does not keep: it is meant for programs that a person runs."""


def is_privileged() -> bool:
    """Whether this process may do more than those who chose its environment and current directory."""
    return os.geteuid() == 0 or os.geteuid() != os.getuid() or os.getegid() != os.getgid()


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` as a program in a new interpreter.

    To be started with `environment` and with ``cwd`` set to a directory of ours. "-m MODULE" is there for people who look at
    the list of processes.
    """
    flags = ["-I"] if is_privileged() else ["-P"] if sys.version_info >= (3, 11) else []
    flags += ["-B"] if sys.dont_write_bytecode else []
    return [interpreter(), *flags, "-c", _BOOTSTRAP, "-m", module, *arguments]


def script_command(path: str, *arguments: str) -> list[str]:
    """The command line that runs a file of ours that imports the standard library alone."""
    return [interpreter(), "-I", "-S", path, *arguments]


def interpreter() -> str:
    """The interpreter that runs this process."""
    return sys.executable or "python3"  # empty where Python is embedded in another program


def shown_command(module: str) -> list[str]:
    """The words as which a process that runs ``module`` is to be listed."""
    return [interpreter(), "-m", module]


def environment(ours: Mapping[str, str] | None = None, *, of_trainer: bool = False) -> dict[str, str]:
    """The environment of an interpreter started with `module_command`; ``ours``: this process's, unless given."""
    found = program_environment(ours)
    found[_IMPORT_PATH] = ":".join(import_path(of_trainer=of_trainer))
    return found


def program_environment(ours: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program that is not an interpreter of ours."""
    ours = os.environ if ours is None else ours
    if not is_privileged():
        return {name: value for name, value in ours.items() if name not in _HOOKS}
    found = {
        name: value
        for name, value in ours.items()
        if name in _SAFE_VARIABLES or name.startswith(("CIUIC_", "LC_"))
    }
    found["PATH"] = SYSTEM_PATH
    # An interpreter of a module system or of conda may need it to start at all. The same rule as for the import path.
    libraries = [entry for entry in ours.get("LD_LIBRARY_PATH", "").split(":") if _is_safe_entry(entry)]
    if libraries:
        found["LD_LIBRARY_PATH"] = ":".join(libraries)
    return found


def import_path(entries: Sequence[object] | None = None, *, of_trainer: bool = False) -> list[str]:
    """The entries of ``sys.path`` (or ``entries``) that a child may have, and the directory of this package in any case.

    Entries that are not absolute mean the current directory of each process, and are left out. An entry with a colon cannot be
    passed on, as in PYTHONPATH.

    Args:
        of_trainer: this process is a training: all it imports from it has imported from already, and its snapshots depend on
            packages in places such as a volume of its container that belongs to another user. Of what others may write
            only the current directory is left out.
    """
    found = [
        entry
        for entry in (sys.path if entries is None else entries)
        if isinstance(entry, str) and entry.startswith("/") and ":" not in entry
    ]
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if is_privileged():
        # The interpreter's own directories come from where it was installed; others may be found in its environment.
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
    """The absolute path of a system's program such as systemctl; ``name`` itself where there is none.

    A privileged process looks for it in `SYSTEM_PATH` alone, another one in its PATH.
    """
    if "/" in name:
        return name
    return shutil.which(name, path=SYSTEM_PATH if is_privileged() else None) or (
        f"/usr/bin/{name}" if is_privileged() else name
    )


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed: nothing can be imported from it


def _is_safe_entry(entry: str) -> bool:
    """Whether nobody but root and this user may put a file there."""
    if not entry.startswith("/") or not os.path.exists(entry):
        return False
    try:
        return find_flaw(entry) is None
    except OSError:
        return False

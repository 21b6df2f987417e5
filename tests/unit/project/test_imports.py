"""Tests of what `import ciuic` and the start of a command cost: who wants one thing does not pay for all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.restoring import take

from ciuic.repository import Repository

FRAMEWORKS = {
    "torch",
    "numpy",
    "tensorflow",
    "keras",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
}
OF_THE_DAEMON = {"pyfuse3", "trio", "h11", "apscheduler", "prometheus_client"}
OF_THE_COMMANDS = {"click", "rich", "structlog", "asyncio"}


def _imported(program: str, environment: Mapping[str, str] | None = None) -> set[str]:
    """Return the modules that a fresh interpreter imports for ``program``, beyond its usual ones."""
    source = f"import sys; before = set(sys.modules)\n{program}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", source],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )
    # The last line: what stands before it was printed by the program.
    return set(done.stdout.splitlines()[-1].split())


def test_import_ciuic_imports_nothing_else() -> None:
    """`import ciuic` imports no framework and no library, and the integrations only when they are used."""
    modules = _imported("import ciuic, ciuic.integrations")
    assert {name for name in modules if name.startswith("ciuic")} == {"ciuic", "ciuic.integrations"}
    assert not {name.partition(".")[0] for name in modules} & (
        FRAMEWORKS | OF_THE_DAEMON | OF_THE_COMMANDS | {"msgspec"}
    )


def test_a_command_answers_an_interrupt_before_it_imports() -> None:
    """Nothing is imported before `main` runs, which answers ^C first."""
    assert _imported("from ciuic.cli import main") == {"__future__", "ciuic", "ciuic.cli"}


def test_the_manager_needs_nothing_of_the_daemon_or_the_frameworks() -> None:
    """The manager imports neither daemon nor frameworks, so it works where they are not installed."""
    modules = {name.partition(".")[0] for name in _imported("from ciuic import SnapshotManager")}
    assert not modules & (FRAMEWORKS | OF_THE_DAEMON | OF_THE_COMMANDS)


def test_a_whole_life_of_a_manager_imports_no_framework(tmp_path: object) -> None:
    """Saving and loading a state that needs no framework imports none."""
    program = (
        "from ciuic import SnapshotManager\n"
        f"with SnapshotManager({str(tmp_path)!r} + '/s') as manager:\n"
        "    manager.save_snapshot(progress={'step': 3}, wait=True)\n"
        "    assert manager.load_latest_snapshot()['progress'] == {'step': 3}"
    )
    modules = {name.partition(".")[0] for name in _imported(program)}
    assert not modules & (FRAMEWORKS | OF_THE_DAEMON | {"click"})


HEAVY = {"rich", "httpx", "zstandard", "trio", "pathspec", "structlog", "asyncio", "tempfile", "dataclasses"}
"""Modules that take 5 ms and more of processor time, and that few commands need."""
REPOSITORY = {"msgspec", "sqlite3", "pathlib", "socket", "ciuic.config", "ciuic.repository"}
FRONT_ENDS = {"signal", "locale", "binascii", "heapq", "selectors", "ciuic.repository.locks"}
"""Modules of a millisecond and less that no command needs at its start."""
FILES = {"tomli", "pwd", "ciuic.config.toml_source", "ciuic.config.owners"}
"""Modules that read a file of the configuration, of which there is an empty one in these tests."""
PATTERNS = {"ciuic.excludes", "ciuic.config.flat"}
WRITING = {
    "ctypes",
    "hashlib",
    "random",
    "json",
    "socket",
    "dataclasses",
    "ciuic.config",
    "ciuic.excludes",
    "ciuic.retention",
} | {
    "ciuic.cli.shared.lazy_restore",
    "ciuic.cli.shared.safety_snapshot",
    "ciuic.protocol.worker_client",
    "ciuic.repository.bulk_reader",
    "ciuic.repository.byte_planes",
    "ciuic.repository.extent_sharing",
    "ciuic.repository.locks",
    "ciuic.repository.promised",
    "ciuic.system.page_cache",
}
UNUSED = {
    "--version": HEAVY
    | REPOSITORY
    | FRONT_ENDS
    | {"bz2", "ctypes", "hashlib", "json", "click.shell_completion"},
    # click asks shutil for the width of the terminal, which imports bz2, and gettext for words of the help.
    "--help": HEAVY
    | REPOSITORY
    | (FRONT_ENDS - {"locale", "binascii"})
    | {"ctypes", "hashlib", "json", "click.shell_completion"},
    "list": HEAVY
    | FRONT_ENDS
    | {"bz2", "ctypes", "hashlib", "json", "socket", "ciuic.config", "ciuic.protocol.pairing"},
    "list --machine-readable": HEAVY
    | FRONT_ENDS
    | {"bz2", "ctypes", "hashlib", "json", "socket", "ciuic.config"},
    # The whole program of it, without a daemon; what jobs call is in test_fast_snapshot.
    "snapshot": HEAVY
    | FRONT_ENDS
    | PATTERNS
    | {"bz2", "ctypes", "hashlib", "json", "random", "socket", "sqlite3", "subprocess", "ciuic.repository"},
    # Without a daemon: it reads the repository, too.
    "status": HEAVY
    | FRONT_ENDS
    | PATTERNS
    | {"bz2", "ctypes", "difflib", "hashlib", "json", "random", "socket", "ciuic.protocol.pairing"}
    | {
        "ciuic.cli.commands.list",
        "ciuic.protocol.last_drill",
        "ciuic.protocol.known_damage",
        "ciuic.repository.promised",
    },
    "restore --snapshot latest --path {source} --dest {source}/there --dry-run": WRITING,
    "prune --dry-run": {"bz2", "hashlib", "json", "random", "rich", "socket", "trio", "ciuic.compare.diff"},
}


@pytest.mark.parametrize("command", UNUSED)
def test_a_command_imports_what_it_uses(command: str, tmp_path: Path) -> None:
    """The start is most of the time of a command that scripts run all day: it imports nothing that it does not use."""
    repository, source = tmp_path / "repository", tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"content")
    with Repository.create(repository) as made:
        take(made, source)
    program = (
        "from contextlib import suppress; from ciuic.cli import app; from ciuic.errors import Unreachable\n"
        f"with suppress(Unreachable): app.cli.main({command.format(source=source).split()!r}, standalone_mode=False, obj=app.Session())"
    )
    # Records of restores are read where there are any, below the state directory.
    environment = {
        "CIUIC_CONFIG": "/dev/null",
        "CIUIC_REPO": str(repository),
        "XDG_STATE_HOME": str(tmp_path),
    }
    found = _imported(program, environment)
    assert found & UNUSED[command] == set()


def test_a_configuration_without_a_file_imports_no_parser() -> None:
    """Defaults need neither what reads TOML nor what says whose a file is."""
    program = "from ciuic.config.load import load_config; load_config(environ={}, searched=())"
    assert _imported(program) & (FILES | PATTERNS) == set()

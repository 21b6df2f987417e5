"""Tests of what `import ciuic` costs: a program that wants one thing does not pay for all."""

from __future__ import annotations

import subprocess
import sys

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


def _imported(program: str) -> set[str]:
    """Return the modules that a fresh interpreter imports for ``program``, beyond its usual ones."""
    source = f"import sys; before = set(sys.modules)\n{program}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=60
    )
    return set(done.stdout.split())


def test_import_ciuic_imports_nothing_else() -> None:
    """`import ciuic` imports no framework and no library, and the integrations only when they are used."""
    modules = _imported("import ciuic, ciuic.integrations")
    assert {name for name in modules if name.startswith("ciuic")} == {"ciuic", "ciuic.integrations"}
    assert not {name.partition(".")[0] for name in modules} & (
        FRAMEWORKS | OF_THE_DAEMON | OF_THE_COMMANDS | {"msgspec"}
    )


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

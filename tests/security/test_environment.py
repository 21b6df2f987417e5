"""Attacker: a user who controls the environment or current directory of a process of root's.

None of the attacker's code runs, and none of its programs is found.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.system import child_process
from ciuic.system.child_process import (
    environment,
    find_program,
    import_path,
    module_command,
    program_environment,
)

CHECKOUT = Path(__file__).parents[2]
STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="what root does for others needs root")
_CLI = "import sys; from ciuic.cli import main; sys.argv[0] = 'ciuic'; main()"


def foreign_directory(path: Path) -> Path:
    path.mkdir()
    os.chown(path, STRANGER, STRANGER)
    return path


def plant(where: Path, module: str, mark: Path) -> None:
    """Write a module that leaves a mark when it is imported."""
    package = where / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(mark)!r}, 'w').close()\n")


def ciuic(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as the installed script does: without the current directory on its import path."""
    return subprocess.run(
        [sys.executable, "-I", "-c", _CLI, *arguments],
        cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def offline(repository: Path, root: Path) -> None:
    command = module_command(
        "ciuic.daemon.capture.process", "--offline", "--repo", str(repository), "--root", str(root)
    )
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=120, cwd="/")


@needs_root
def test_a_restore_runs_no_code_from_the_current_directory(tmp_path: Path) -> None:
    """A restore by root runs no code from the current directory, also in its safety snapshot."""
    from ciuic.repository import Repository

    root, repository, mark = tmp_path / "root", tmp_path / "repository", tmp_path / "mark"
    root.mkdir()
    (root / "file").write_text("one")
    Repository.create(repository).close()
    offline(repository, root)
    config = tmp_path / "ciuic.toml"
    config.write_text(
        f'[repository]\npath = "{repository}"\n[daemon]\nruntime_dir = "{tmp_path}/run"\n[[root]]\npath = "{root}"\n'
    )
    hostile = foreign_directory(tmp_path / "hostile")
    for module in ("ciuic", "msgspec", "runpy"):
        plant(hostile, module, mark)
    (root / "file").write_text("two")
    done = ciuic(
        hostile, "--config", str(config), "restore", "-s", "latest", "-p", str(root / "file"), "--overwrite",
        PYTHONPATH=f":{hostile}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "safety snapshot cs-" in done.stderr
    assert (root / "file").read_text() == "one"
    assert not mark.exists()


@needs_root
def test_a_child_of_root_has_known_variables_alone(tmp_path: Path) -> None:
    """A child of root gets known variables alone: no hook of interpreters or C libraries reaches it."""
    hostile = {
        **{f"PYTHON{name}": "/x" for name in ("PATH", "STARTUP", "HOME", "USERBASE", "PLATLIBDIR", "PYCACHEPREFIX")},
        "PYTHONINSPECT": "1", "PYTHONWARNINGS": "error::antigravity.X", "PYTHONBREAKPOINT": "x.y",
        "LD_PRELOAD": "/x.so", "LD_AUDIT": "/x.so", "LD_LIBRARY_PATH": f"{tmp_path}/none:relative:", "GCONV_PATH": "/x",
        "LOCPATH": "/x", "NLSPATH": "/x", "BASH_ENV": "/x", "ENV": "/x", "IFS": "x", "TMPDIR": "/x", "SQLITE_TMPDIR": "/x",
        "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/x", "SYSTEMD_UNIT_PATH": "/x", "PATH": "/x",
    }  # fmt: skip
    kept = {"LANG": "C.UTF-8", "LC_TIME": "C", "TZ": "UTC", "CIUIC_WITHOUT_PASSTHROUGH": "1"}
    found = program_environment({**hostile, **kept})
    assert found == {**kept, "PATH": child_process.SYSTEM_PATH}
    assert set(environment({**hostile, **kept})) == {*found, "CIUIC_IMPORT_PATH"}


@pytest.mark.parametrize("privileged", [True, False])
def test_no_child_gets_the_secrets_of_remotes_but_those_that_open_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, privileged: bool
) -> None:
    """Passphrases, recovery keys and paths of key files reach the processes that upload states, no other child and no key command."""
    from ciuic.remote.sealing.key_slots import run_key_command
    from ciuic.training.remote.uploads import store_variables

    monkeypatch.setattr(child_process, "is_privileged", lambda: privileged)
    secrets = {f"CIUIC_REMOTE_{name}": "secret" for name in ("PASSPHRASE", "RECOVERY_KEY", "KEY_FILE")}
    needed = {"CIUIC_CONFIG": "/x.toml", "CIUIC_WITHOUT_PASSTHROUGH": "1", "LANG": "C.UTF-8"}
    given = {**secrets, **needed, "CIUIC_ANYTHING": "x", "PATH": os.environ["PATH"]}
    expected = {**needed, "PATH": child_process.SYSTEM_PATH if privileged else given["PATH"]}
    assert program_environment(given) == expected
    assert set(environment(given)) == {*expected, "CIUIC_IMPORT_PATH"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"
    run_key_command(["/bin/sh", "-c", f"env > {told}; printf %064d 1"])
    assert "CIUIC_REMOTE_" not in told.read_text()
    assert secrets.items() <= store_variables().items()


@needs_root
def test_a_child_of_root_imports_only_from_directories_of_root(tmp_path: Path) -> None:
    """A child of root imports only from directories that root alone can write.

    Left out are the current directory and entries that other users own or may write, or whose parents they
    may write.
    """
    good, open_to_all, below = tmp_path / "good", tmp_path / "open", tmp_path / "open/below"
    foreign = foreign_directory(tmp_path / "foreign")
    for path in (good, open_to_all, below):
        path.mkdir()
    open_to_all.chmod(0o777)
    entries = ["", ".", "relative", str(foreign), str(open_to_all), str(below), str(good), f"{good}:x"]
    assert import_path([*entries, str(CHECKOUT), *sys.path])[0] == str(good)
    found = import_path([*entries, str(CHECKOUT)])
    assert found == [str(good), str(CHECKOUT)]
    assert import_path([str(good)]) == [str(CHECKOUT), str(good)]


@needs_root
def test_a_training_of_root_keeps_its_packages_but_not_its_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training of root's keeps its packages and drops its current directory.

    A container's volume often belongs to another user; the trainer has imported from it already.
    """
    packages, here = foreign_directory(tmp_path / "packages"), foreign_directory(tmp_path / "here")
    monkeypatch.chdir(here)
    found = import_path(["", str(here), str(packages), str(CHECKOUT)], of_trainer=True)
    assert found == [str(packages), str(CHECKOUT)]


@pytest.mark.parametrize("privileged", [True, False])
def test_a_child_finds_this_very_package_wherever_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privileged: bool
) -> None:
    """A child imports this very package even if its current directory has one of the same name."""
    if privileged and os.geteuid() != 0:
        pytest.skip("isolated mode is root's")
    monkeypatch.setattr(child_process, "is_privileged", lambda: privileged)
    plant(tmp_path, "ciuic", tmp_path / "mark")
    done = _run_child("ciuic.cli.shared.messages", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mark").exists()


def test_an_ordinary_users_child_has_its_parents_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user's child has its parent's import path and the variables that libraries may need."""
    monkeypatch.setattr(child_process, "is_privileged", lambda: False)
    (tmp_path / "of_the_training.py").write_text(
        "import json, os, sys; print(json.dumps([sys.path, sys.argv, os.environ.get('LD_LIBRARY_PATH')]))"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/training")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    done = _run_child("of_the_training", Path("/"), "--word")
    path, words, libraries = json.loads(done.stdout)
    assert path == import_path()
    assert words == [str(tmp_path / "of_the_training.py"), "--word"]
    assert libraries == "/of/the/training"
    assert "PYTHONSTARTUP" not in environment()


def _run_child(module: str, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        module_command(module, *words),
        env=environment(), cwd=cwd, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@needs_root
def test_root_looks_for_programs_where_the_system_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root looks for programs in the system's directories and not along its caller's PATH."""
    for name in ("stat", "no-such-program"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:.:{os.environ['PATH']}")
    assert find_program("stat") in ("/usr/bin/stat", "/bin/stat")
    assert find_program("no-such-program") == "/usr/bin/no-such-program"


def _product_files() -> Iterator[Path]:
    yield from sorted((CHECKOUT / "ciuic").rglob("*.py"))


_STARTS = {"Popen", "run", "call", "check_call", "check_output", "open_process", "run_process"}
_MODULES = {"subprocess", "trio", "lowlevel"}
_BECOMES = {
    "ciuic/fuse_layer/prefork/service.py": "the unit's command becomes the process that forks workers, as all children are started"
}
_CALLERS_OWN = {
    "ciuic/cli/commands/watch.py": "the command that the caller names, as the caller would run it",
    "ciuic/system/slurm.py": "Slurm's scontrol and squeue, in the environment that Slurm gave the job",
    "ciuic/cli/commands/slurm.py": "the command of the caller's job, as the caller would run it",
    "ciuic/daemon/base/alert_hook.py": "the operator's command; tests/security/test_alert_text.py",
}


def test_interpreters_are_started_in_one_place_and_children_get_directory_and_environment() -> None:
    """Only one module names sys.executable, and each start of a child gives directory and environment."""
    wrong = []
    for path in _product_files():
        name = str(path.relative_to(CHECKOUT))
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{name}:{getattr(node, 'lineno', 0)}"
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "executable"
                # The second looks for files beside it, the third shows it.
                and name not in ("ciuic/system/child_process.py", "ciuic/cli/shared/systemd.py", "ciuic/errors.py")
            ):  # fmt: skip
                wrong.append(f"{where} names sys.executable")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                given = {keyword.arg for keyword in node.keywords}
                owner = node.func.value
                owner_name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if (
                    node.func.attr in _STARTS and owner_name in _MODULES and owner_name + node.func.attr != "triorun"
                    and name not in _CALLERS_OWN and not {"cwd", "env"} <= given
                ):  # fmt: skip
                    wrong.append(f"{where} starts a process without cwd and env")
                if (
                    name not in _BECOMES
                    and owner_name == "os"
                    and node.func.attr.startswith(("exec", "spawn", "posix_spawn", "popen", "system"))
                ):
                    wrong.append(f"{where} calls os.{node.func.attr}")
    assert wrong == []

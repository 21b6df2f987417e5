"""Attacker: a user who may write the configuration, a directory on the way to it, or a program that it names.

Root refuses such files.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from ciuic.cli.app import cli
from ciuic.cli.fast_snapshot import find_socket
from ciuic.config import AlertConfig, alert_flaw, load_config
from ciuic.daemon.service import run_daemon
from ciuic.errors import ConfigError
from ciuic.protocol.peer_socket import runtime_dir
from ciuic.system.ownership import find_flaw

STRANGER = 54321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what others may do to root's files needs root")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Provide a configuration that root alone can change."""
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc/ciuic.toml"
    file.write_text(f'[daemon]\nruntime_dir = "{tmp_path}/run"\n')
    file.chmod(0o644)
    return file


def by_owner(file: Path) -> None:
    os.chown(file, STRANGER, 0)


def by_group(file: Path) -> None:
    os.chown(file, 0, STRANGER)
    file.chmod(0o664)


def by_all_users(file: Path) -> None:
    file.chmod(0o646)


def by_directory(file: Path) -> None:
    file.parent.chmod(0o777)


def by_owner_of_directory(file: Path) -> None:
    os.chown(file.parent, STRANGER, STRANGER)


def by_access_list(file: Path) -> None:
    done = subprocess.run(["setfacl", "-m", f"u:{STRANGER}:rw", file], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no ACLs here")


def by_link(file: Path) -> None:
    """Reach the safe file through a link in another user's directory."""
    safe, theirs = file.parent / "safe.toml", file.parent.parent / "theirs"
    theirs.mkdir()
    file.rename(safe)
    (theirs / "link.toml").symlink_to(safe)
    os.lchown(theirs / "link.toml", STRANGER, STRANGER)
    os.chown(theirs, STRANGER, STRANGER)
    file.symlink_to(theirs / "link.toml")


ATTACKS = [by_owner, by_group, by_all_users, by_directory, by_owner_of_directory, by_access_list, by_link]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.parametrize("attack", ATTACKS)
def test_root_refuses_a_configuration_that_others_may_write(
    config: Path, attack: Callable[[Path], None]
) -> None:
    """Daemon and commands of root refuse a configuration that others may write, with owner, mode and remedy.

    `config check` and `doctor` report it too.
    """
    load_config(config)
    attack(config)
    with pytest.raises(ConfigError, match=r"must be root's own.*owner uid \d+, mode \d{4}") as refused:
        load_config(config)
    assert "chown" in refused.value.hint
    assert run("--config", str(config), "config", "show").exit_code == 2
    checked = run("--config", str(config), "config", "check", "--json")
    assert checked.exit_code == 2
    assert "must be root's own" in json.loads(checked.stdout)["problems"][0]["message"]
    examined = json.loads(run("--config", str(config), "doctor", "--json").stdout)
    assert any("must be root's own" in finding["message"] for finding in examined["findings"])
    assert find_socket({"CIUIC_CONFIG": str(config)}) is None
    assert runtime_dir({"CIUIC_CONFIG": str(config)}) == "/run/ciuic"


def test_safe_configurations_are_accepted(config: Path) -> None:
    """Root accepts a configuration below a sticky directory, through links of its own, or readable by all."""
    config.parent.parent.chmod(0o1777)
    link = config.parent / "other.toml"
    link.symlink_to("../etc/./ciuic.toml")
    assert find_flaw(link) is None
    assert load_config(link).runtime_dir == config.parent.parent / "run"
    assert runtime_dir({"CIUIC_CONFIG": str(config)}) == str(config.parent.parent / "run")


def test_the_file_that_is_opened_is_checked(config: Path, tmp_path: Path) -> None:
    """A path with `..` behind a link is checked as the kernel follows it, not as its text reads."""
    config.rename(config.parent / "conf")
    theirs = tmp_path / "theirs"
    (theirs / "below").mkdir(parents=True)
    (theirs / "conf").write_text(f'[daemon]\nruntime_dir = "{tmp_path}/theirs"\n')
    os.chown(theirs / "conf", STRANGER, STRANGER)
    (config.parent / "link").symlink_to(theirs / "below")
    path = f"{config.parent}/link/../conf"
    flaw = find_flaw(path)
    assert flaw is not None
    assert flaw.path == str(theirs / "conf")
    with pytest.raises(ConfigError, match="must be root's own"):
        load_config(Path(path))
    assert find_socket({"CIUIC_CONFIG": path}) is None
    assert runtime_dir({"CIUIC_CONFIG": path}) == "/run/ciuic"


@pytest.mark.parametrize("end", ["", "/", "/.", "/below/..", "/below/../", "//./below/.."])
def test_a_sticky_directory_is_accepted_above_the_path_alone(tmp_path: Path, end: str) -> None:
    """A directory in which everybody may make files is a flaw where the path leads to it, in any spelling."""
    (tmp_path / "shared/below").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "link").symlink_to(f"{tmp_path}/shared{end}")
    assert find_flaw(tmp_path / "shared/below") is None
    for path in (f"{tmp_path}/shared{end}", tmp_path / "link"):
        flaw = find_flaw(path)
        assert flaw is not None
        assert flaw.path == str(tmp_path / "shared")


_PARTS = st.lists(st.sampled_from(["a", "b", "file", "down", "up", "root", "..", ".", ""]), max_size=8)


@given(_PARTS, st.booleans())
@example(["root", "..", "file"], False)
@example(["down", "..", "up", "file"], True)
@example(["..", "a", "up", "..", "..", "b", "a", ""], True)
def test_the_path_leads_where_the_kernel_leads(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], relative: bool
) -> None:
    """Exactly the file that open(2) reaches in a tree of links is reported, if it is another user's."""
    top = tmp_path_factory.mktemp("tree")
    for name in ("a", "a/b", "b", "b/a"):
        (top / name).mkdir()
        (top / name / "file").touch()
        (top / name / "down").symlink_to(top / "a/b")
        (top / name / "up").symlink_to("../b")
        (top / name / "root").symlink_to(f"{top}/a/../b/./a")
    path = "/".join([str(top / "a"), *parts])
    try:
        reached = os.path.realpath(path, strict=True)
    except OSError:
        return
    # Nothing above the test's own directory is given away.
    if not reached.startswith(f"{top}/"):
        return
    os.chown(reached, STRANGER, STRANGER)
    flaw = find_flaw(os.path.relpath(top) + path[len(str(top)) :] if relative else path)
    assert flaw is not None
    assert flaw.path == reached


def test_a_missing_file_is_reported_as_missing_not_as_unsafe(tmp_path: Path) -> None:
    """A missing file or a circular link on the way is reported as itself, not as unsafe."""
    assert find_flaw(tmp_path / "nothing/there") is None
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        find_flaw(tmp_path / "loop")


def test_the_daemon_does_not_start_in_a_runtime_directory_of_others(config: Path, tmp_path: Path) -> None:
    """The daemon does not start in a runtime directory of another user, who could put sockets there."""
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=r"runtime_dir.*owned by another user"):
        run_daemon(load_config(config))


@pytest.mark.parametrize("interpreter", ["", "/bin/sh", "/usr/bin/env"])
def test_an_alert_program_that_others_may_write_is_reported(
    config: Path, tmp_path: Path, interpreter: str
) -> None:
    """An alert program that others may write is reported, also if it is a script of the named interpreter.

    test_alert_text.py shows that it is not run.
    """
    hook = tmp_path / "hook"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o777)
    words = [*filter(None, [interpreter]), str(hook)]
    config.write_text(f"[alert]\ncommand = {json.dumps(words)}\n")
    checked = json.loads(run("--config", str(config), "config", "check", "--json").stdout)
    # A daemon that sends no alerts is better than no daemon.
    assert checked["valid"]
    assert [p["message"] for p in checked["problems"] if "alert.command is not run" in p["message"]]
    examined = json.loads(run("--config", str(config), "--repo", str(tmp_path), "doctor", "--json").stdout)
    assert [f for f in examined["findings"] if f["check"] == "owners" and "alert.command" in f["message"]]


def test_an_alert_program_may_belong_to_the_user_that_it_is_run_as(tmp_path: Path) -> None:
    """An alert program may belong to the user it runs as; to be run as root it must not be another user's."""
    import pwd

    user = pwd.getpwnam("nobody")
    hook = tmp_path / "hook"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    os.chown(hook, user.pw_uid, user.pw_gid)
    assert alert_flaw(AlertConfig((str(hook),), "nobody", 30)) is None
    flaw = alert_flaw(AlertConfig((str(hook),), None, 30))
    assert flaw is not None
    assert flaw.path == str(hook)

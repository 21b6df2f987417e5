"""An attacker who may write the configuration, a directory on the way to it, or a program that it names: root does not go by it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ciuic.cli.app import cli
from ciuic.cli.quick import find_socket
from ciuic.config import AlertConfig, alert_flaw, load_config
from ciuic.daemon.main import run_daemon
from ciuic.errors import ConfigError
from ciuic.ownership import find_flaw
from ciuic.runtime_dir import runtime_dir

STRANGER = 54321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what others may do to root's files needs root")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration that root alone can change."""
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


def by_everybody(file: Path) -> None:
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
    """The file lies safely, and is reached through a directory of somebody else's."""
    safe, theirs = file.parent / "safe.toml", file.parent.parent / "theirs"
    theirs.mkdir()
    file.rename(safe)
    (theirs / "link.toml").symlink_to(safe)
    os.lchown(theirs / "link.toml", STRANGER, STRANGER)
    os.chown(theirs, STRANGER, STRANGER)
    file.symlink_to(theirs / "link.toml")


ATTACKS = [by_owner, by_group, by_everybody, by_directory, by_owner_of_directory, by_access_list, by_link]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.parametrize("attack", ATTACKS)
def test_root_refuses_a_configuration_that_others_may_write(
    config: Path, attack: Callable[[Path], None]
) -> None:
    """Daemon and commands alike, with owner, mode and remedy; `config check` and `doctor` say so, too."""
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


def test_what_is_safe_is_accepted(config: Path) -> None:
    """Below a directory with the sticky bit, through links of root's own, and readable by everybody."""
    config.parent.parent.chmod(0o1777)
    link = config.parent / "other.toml"
    link.symlink_to("../etc/./ciuic.toml")
    assert find_flaw(link) is None
    assert load_config(link).runtime_dir == config.parent.parent / "run"
    assert runtime_dir({"CIUIC_CONFIG": str(config)}) == str(config.parent.parent / "run")


def test_a_name_that_others_could_still_make_is_no_flaw_of_what_is_there(tmp_path: Path) -> None:
    """A missing file is somebody else's error; links that go round and round are one of their own."""
    assert find_flaw(tmp_path / "nothing/there") is None
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        find_flaw(tmp_path / "loop")


def test_the_daemon_does_not_start_in_a_runtime_directory_of_others(config: Path, tmp_path: Path) -> None:
    """Whoever owns it could put sockets of its own there."""
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=r"runtime_dir.*owned by another user"):
        run_daemon(load_config(config))


@pytest.mark.parametrize("interpreter", ["", "/bin/sh", "/usr/bin/env"])
def test_an_alert_program_that_others_may_write_is_told(
    config: Path, tmp_path: Path, interpreter: str
) -> None:
    """Also if it is a script that the named program interprets. That it is not run: test_alert_text.py."""
    hook = tmp_path / "hook"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o777)
    words = [*filter(None, [interpreter]), str(hook)]
    config.write_text(f"[alert]\ncommand = {json.dumps(words)}\n")
    checked = json.loads(run("--config", str(config), "config", "check", "--json").stdout)
    assert checked["valid"]  # a daemon that tells nobody is better than none
    assert [p["message"] for p in checked["problems"] if "alert.command is not run" in p["message"]]
    examined = json.loads(run("--config", str(config), "--repo", str(tmp_path), "doctor", "--json").stdout)
    assert [f for f in examined["findings"] if f["check"] == "owners" and "alert.command" in f["message"]]


def test_an_alert_program_may_belong_to_the_user_that_it_is_run_as(tmp_path: Path) -> None:
    """Nobody gains anything by that; what another user's file would be as root is refused."""
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

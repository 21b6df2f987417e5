"""Attacker: a user who prepares a repository where root would make one.

Root writes nothing there unless told to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.second_user import MADE_UP, run_as
from support.site import site_in
from support.until import until

from ciuic.cli.app import cli
from ciuic.config import load_config
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.settings import settings_of
from ciuic.daemon.capture.job import CaptureJob
from ciuic.daemon.capture.process import run_job as capture
from ciuic.daemon.jobs import UpkeepJob
from ciuic.daemon.jobs import run_upkeep_job as upkeep
from ciuic.errors import NotPermitted
from ciuic.repository import Repository
from ciuic.repository.trust import ForeignRepository
from ciuic.retention import RetentionPolicy
from ciuic.system.child_process import environment, module_command
from ciuic.system.disk import Disk

STRANGER = MADE_UP.uid
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what another user prepares for root needs root")


def hand_over(top: Path) -> None:
    """Give everything in it to the stranger, as if the stranger had made it."""
    for folder, folders, files in os.walk(top):
        for name in (".", *folders, *files):
            os.chown(os.path.join(folder, name), STRANGER, STRANGER, follow_symlinks=False)


def state_of(top: Path) -> dict[str, tuple[int, int]]:
    """Return every file with its size and change time."""
    found = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (status.st_size, status.st_mtime_ns)
    return found


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Return the stranger's repository, with one snapshot of ``root/file``."""
    root, repository = tmp_path / "root", tmp_path / "repository"
    root.mkdir()
    (root / "file").write_text("stored")
    Repository.create(repository).close()
    command = module_command(
        "ciuic.daemon.capture.process", "--offline", "--repo", str(repository), "--root", str(root)
    )
    subprocess.run(command, env=environment(), cwd="/", check=True, capture_output=True, timeout=120)
    hand_over(repository)
    return repository


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.parametrize(
    "command",
    [
        ["hold", "latest"], ["release", "latest"], ["forget", "-y", "latest"], ["prune"], ["check", "--repair"],
        ["verify", "--checksum", "--max-duration", "1s"],
    ],
)  # fmt: skip
def test_commands_of_root_write_nothing_there(filled: Path, tmp_path: Path, command: list[str]) -> None:
    """Writing commands of root end with 7 and name owner and remedy; with the option they succeed."""
    config = tmp_path / "ciuic.toml"
    config.write_text(f'[daemon]\nruntime_dir = "{tmp_path}/run"\n')
    options = ["--config", str(config), "--repo", str(filled)]
    before = state_of(filled)
    refused = run(*options, *command)
    assert refused.exit_code == 7, refused.output
    assert f"owner uid {STRANGER}" in refused.stderr
    assert "--trust-repository" in refused.stderr
    assert state_of(filled) == before
    assert run(*options, "--trust-repository", *command).exit_code == 0


@pytest.mark.parametrize(
    "command", [["list"], ["show", "latest"], ["verify", "latest"], ["check"], ["prune", "--dry-run"]]
)
def test_root_reads_a_foreign_repository_with_one_warning(
    filled: Path, tmp_path: Path, command: list[str]
) -> None:
    """Root may read a stranger's repository, with one warning on stderr, which -q leaves out."""
    config = tmp_path / "ciuic.toml"
    config.write_text("")
    options = ["--config", str(config), "--repo", str(filled)]
    done = run(*options, *command)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("another user may have written") == 1
    assert "another user" not in run(*options, "-q", *command).stderr


def test_a_restore_from_it_puts_no_safety_snapshot_there(filled: Path, tmp_path: Path) -> None:
    """A restore from a stranger's repository puts no safety snapshot there, and still restores.

    The stranger could read files of a protected root in it.
    """
    root = tmp_path / "root"
    config = tmp_path / "ciuic.toml"
    config.write_text(
        f'[repository]\npath = "{tmp_path}/other"\n[daemon]\nruntime_dir = "{tmp_path}/run"\n[[root]]\npath = "{root}"\n'
    )
    (root / "file").write_text("secret of today")
    before = state_of(filled)
    done = run(
        "--config", str(config), "--repo", str(filled), "restore", "-s", "latest", "-p", str(root / "file"), "--overwrite"
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "no safety snapshot" in done.stderr
    assert (root / "file").read_text() == "stored"
    assert state_of(filled) == before


def by_owner(place: Path) -> None:
    place.mkdir()
    os.chown(place, STRANGER, STRANGER)


def by_mode(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def by_parent(place: Path) -> None:
    place.parent.chmod(0o777)


def by_owner_of_parent(place: Path) -> None:
    os.chown(place.parent, STRANGER, STRANGER)


def by_link(place: Path) -> None:
    theirs = place.parent.parent / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    place.symlink_to(theirs)
    os.lchown(place, STRANGER, STRANGER)


ATTACKS = [by_owner, by_mode, by_parent, by_owner_of_parent, by_link]


@pytest.mark.parametrize("attack", ATTACKS)
def test_daemon_and_protect_make_none_where_others_may_write(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    """Daemon and protect make no repository where other users may write, unless configured.

    `config check` and `doctor` say why.
    """
    place, root, config = tmp_path / "disk/repository", tmp_path / "root", tmp_path / "ciuic.toml"
    place.parent.mkdir()
    root.mkdir()
    attack(place)
    text = f'[daemon]\nruntime_dir = "{tmp_path}/run"\n[repository]\npath = "{place}"\n'
    config.write_text(text)
    with pytest.raises(ForeignRepository):
        Store(place, block_bytes=4096).ensure()
    assert run("--config", str(config), "protect", str(root)).exit_code == 7
    assert not Repository.exists(place)
    assert config.read_text() == text
    checked = json.loads(run("--config", str(config), "config", "check", "--json").stdout)
    assert checked["valid"]
    config.write_text(text + f'[[root]]\npath = "{root}"\n')
    for command in (["config", "check"], ["doctor"]):
        done = run("--config", str(config), *command, "--json")
        assert "must be root's own" in done.stdout, command
    assert not settings_of(load_config(config)).trust_repository
    config.write_text(text + f'trust_owner = true\n[[root]]\npath = "{root}"\n')
    assert settings_of(load_config(config)).trust_repository
    assert not settings_of(load_config(config, repository=place)).trust_repository
    Store(place, block_bytes=4096, trusted=True).ensure()
    assert Repository.exists(place)


def test_capture_and_upkeep_look_for_themselves(filled: Path) -> None:
    """Capture and upkeep check the owner themselves, and write nothing after it changed."""
    before = state_of(filled)
    with pytest.raises(ForeignRepository):
        capture(CaptureJob(repository=str(filled), id="cs-000001", time_ns=1, host="h", roots=()), None)  # type: ignore[arg-type]
    with pytest.raises(ForeignRepository):
        upkeep(UpkeepJob(repository=str(filled), policy=RetentionPolicy()))
    with pytest.raises(ForeignRepository):
        Store(filled, block_bytes=4096).latest()
    assert state_of(filled) == before


@pytest.mark.parametrize("as_link", [False, True])
def test_a_directory_that_appears_at_the_last_moment_is_refused(tmp_path: Path, as_link: bool) -> None:
    """A directory that appears just before mkdir, as any user can arrange in /tmp, is refused."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)

    class Quicker(Disk):
        def make_dir(self, path: str, mode: int = 0o700) -> None:
            if as_link:
                os.symlink(theirs, path)
            else:
                os.mkdir(path)
                os.chown(path, STRANGER, STRANGER)
            super().make_dir(path, mode)

    with pytest.raises(NotPermitted):
        Repository.create(tmp_path / "repository", disk=Quicker(), refuse_foreign=True)
    assert list(theirs.iterdir()) == []
    assert list((tmp_path / "repository").iterdir()) == []


def test_a_directory_that_is_refused_is_left_as_it_is(tmp_path: Path) -> None:
    """A refused directory keeps its content and mode."""
    (tmp_path / "file").write_text("x")
    tmp_path.chmod(0o755)
    with pytest.raises(Exception, match="not empty"):
        Repository.create(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_an_ordinary_user_notices_nothing() -> None:
    """An ordinary user's own repository below a group-writable directory works without a warning."""
    # A directory that other users can reach.
    home = Path(tempfile.mkdtemp(prefix="ciuic-stranger-"))
    home.chmod(0o775)
    os.chown(home, STRANGER, STRANGER)
    done = run_as(
        MADE_UP,
        f"Repository.create({str(home / 'r')!r}).close(); require_own({str(home / 'r')!r}, trusted=False); print('well')",
        imports="from ciuic.repository import Repository, Writer\nfrom ciuic.repository.trust import require_own",
    )
    shutil.rmtree(home)
    assert done.stdout == "well\n", done.stderr


@pytest.mark.mount
def test_the_daemon_serves_its_roots_without_a_refused_repository(short_tmp: Path) -> None:
    """The daemon serves its roots without a refused repository and says so.

    Snapshots are refused with the reason, an alert states it, and nothing is written.
    """
    with site_in(short_tmp) as site:
        root = site.root("root")
        (root / "file").write_text("content")
        (short_tmp / "repository").mkdir()
        os.chown(short_tmp / "repository", STRANGER, STRANGER)
        site.start()

        def has_alert() -> bool:
            with site.client() as client:
                return any("must be root's own" in alert.message for alert in client.status().alerts)

        until("the alert", has_alert)
        assert (root / "file").read_text() == "content"
        assert list((short_tmp / "repository").iterdir()) == []
        site.stop()
    shutil.rmtree(short_tmp / "repository")

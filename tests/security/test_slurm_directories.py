"""Attacker: a user whose job names the directory that root's Prolog is to protect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.restoring import take, write
from support.site import CHECKOUT
from support.until import until

from ciuic.cli.commands import slurm
from ciuic.cli.shared.session import Session
from ciuic.config import NoDirectory, RootConfig, add_roots, load_config, remove_roots
from ciuic.errors import CiuicError, ConfigError, NotFound, UsageError
from ciuic.repository import Repository
from ciuic.system.slurm import SlurmJob, check_directory, directory_in_comment

OWNER = os.geteuid()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    (path / "deep").mkdir(parents=True)
    return path


def test_a_directory_of_the_user_is_admitted(own: Path) -> None:
    """A directory that belongs to the job's user, reached through no link, is admitted."""
    check_directory(str(own / "deep"), OWNER)


def test_nothing_else_than_a_directory_of_the_user_is_admitted(own: Path) -> None:
    """Other users' directories, links anywhere in the path, files, and paths that are not plain are refused."""
    (own / "link").symlink_to("/etc")
    (own / "self").symlink_to(own)
    (own / "file").touch()
    os.mkfifo(own / "pipe")
    for path in (
        own / "link", own / "self/deep", own / "file", own / "pipe", own / "missing", f"{own}/./deep", f"{own}//deep",
        f"{own}/deep/../deep", f"{own}/deep/", f"{own}\n/deep", "own", "", "/", f"{own}/\x1b[2J",
    ):  # fmt: skip
        with pytest.raises(CiuicError):
            check_directory(str(path), OWNER)
    with pytest.raises(CiuicError, match="belongs to user"):
        check_directory(str(own), OWNER + 1)


def test_a_comment_names_one_word() -> None:
    """Of a comment with several lines and words one word is the directory, and no later line adds to it."""
    assert directory_in_comment("for the paper ciuic=/data/run ciuic=/etc") == "/data/run"
    assert directory_in_comment("ciuic=/data\nciuic=/etc\n") == "/data"
    assert directory_in_comment("x-ciuic=/data") == directory_in_comment("(null)") == ""


@pytest.mark.mount
def test_a_snapshot_of_another_user_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that somebody has tagged with a job's number is restored for the owner of its directory alone."""
    said: list[str] = []
    for name in ("complain", "note"):
        monkeypatch.setattr(slurm, name, said.append)
    run = tmp_path / "run"
    write(run / "train.py", b"import evil")
    os.chown(run, 12345, 12345)
    with Repository.create(tmp_path / "repository") as repository:
        taken = take(repository, run)
        with repository.writer(command="test") as writer:
            writer.set_marks(taken.id, tags=("slurm-job=4712",))
    remote = SimpleNamespace(url=str(tmp_path / "repository"), name="nas")
    session: Any = SimpleNamespace(config=SimpleNamespace(remotes=(remote,)), config_option=None)
    job = SlurmJob.of({"SLURM_JOB_ID": "4712"})
    assert job is not None
    (run / "train.py").unlink()
    slurm._restore(session, job, os.fsencode(run), 23456, lazily=False)
    assert not list(run.iterdir())
    assert "did not belong to user 23456" in said[-1]
    slurm._restore(session, job, os.fsencode(run), 12345, lazily=False)
    assert (run / "train.py").read_bytes() == b"import evil"


def test_a_job_that_begins_while_slurm_is_asked_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a job that Slurm did not name yet when it was asked stays."""
    (tmp_path / "8001").write_text("\n")

    def ask(node: str) -> frozenset[str]:
        (tmp_path / "8002").write_text("\n")
        return frozenset({"8001"})

    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(slurm, "jobs_on_node", ask)
    session: Any = SimpleNamespace(config=SimpleNamespace(roots=()))
    slurm._forget_lost_jobs(session, tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"8001", "8002"}


@pytest.fixture
def lost(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Give job 2 a node where job 1 has left a root and its record; return the configuration and the record."""
    config, record = tmp_path / "ciuic.toml", tmp_path / "ciuic/slurm/n1/1"
    config.write_text(
        f'[repository]\npath = "{tmp_path}/repository"\n[daemon]\nruntime_dir = "{tmp_path}/run"\n'
    )
    add_roots(config, [RootConfig(own)])
    record.parent.mkdir(parents=True)
    record.write_text(f"{own}\n")
    for name, value in {
        "CIUIC_CONFIG": str(config), "XDG_STATE_HOME": str(tmp_path), "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "2",
        "SLURM_JOB_UID": str(OWNER), "SLURM_JOB_COMMENT": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "jobs_on_node", lambda node: frozenset({"2"}))
    return config, record


def _hook(name: str, config: Path) -> Any:
    return CliRunner().invoke(slurm.command, [name], obj=Session(config_option=config))


def test_any_next_prolog_ends_what_a_lost_job_left_and_names_it_to_nobody(
    lost: tuple[Path, Path], own: Path
) -> None:
    """The prolog of a job that names no directory ends the protection of a lost job's, and prints nothing about it."""
    config, record = lost
    done = _hook("prolog", config)
    assert (done.exit_code, done.output) == (0, "")
    assert not load_config(config).roots
    assert not record.exists()


def test_an_epilog_that_is_killed_at_any_moment_leaves_a_record_of_its_root(
    lost: tuple[Path, Path], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its root has left the configuration an epilog has its record, by which the next prolog ends the protection."""
    config, record = lost
    seen: list[bool] = []

    def die(file: Path, paths: list[Path]) -> None:
        seen.append(record.exists())
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setenv("SLURM_JOB_ID", "1")
        killed.setattr("ciuic.config.remove_roots", die)
        _hook("epilog", config)
    assert seen == [True]
    assert record.exists()
    _hook("prolog", config)
    assert not load_config(config).roots
    assert not record.exists()


def _waits(pid: int) -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any(line.split()[1:3] == ["->", "FLOCK"] and str(pid) in line.split() for line in lines)


def test_a_job_that_begins_while_another_ends_the_protection_of_its_directory_has_it_protected(
    lost: tuple[Path, Path], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prolog waits for an epilog that is about to end the protection of the same directory, and protects it anew."""
    config, record = lost
    monkeypatch.setattr(slurm, "jobs_on_node", lambda node: frozenset({"1", "2"}))
    monkeypatch.setenv("SLURM_JOB_COMMENT", f"ciuic={own}")
    prologs: list[subprocess.Popen[bytes]] = []

    def begin(file: Path, paths: list[Path]) -> object:
        command = [sys.executable, "-m", "ciuic", "--config", str(config), "slurm", "prolog"]
        environment = {**os.environ, "SLURM_JOB_ID": "2", "PYTHONPATH": str(CHECKOUT)}
        prologs.append(subprocess.Popen(command, env=environment, cwd="/"))
        until("the prolog's wait for its turn", lambda: _waits(prologs[0].pid))
        return remove_roots(file, paths)

    with monkeypatch.context() as epilog:
        epilog.setenv("SLURM_JOB_ID", "1")
        epilog.setattr("ciuic.config.remove_roots", begin)
        _hook("epilog", config)
    assert not record.exists()
    assert prologs[0].wait(60) == 0
    assert [root.path for root in load_config(config).roots] == [own]
    assert (record.parent / "2").read_text() == f"{own}\n"


@pytest.mark.parametrize(
    ("error", "is_users"),
    [
        (UsageError("the root leads through a symbolic link"), True),
        (NoDirectory("the root does not exist"), True),
        (FileNotFoundError(2, "gone"), True),
        (ConfigError("the file cannot be edited"), False),
        (NotFound("the disk of the repository is not mounted"), False),
        (CiuicError("no process could be had"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_prolog_that_fails_leaves_nothing_and_no_user_can_make_it_fail(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, is_users: bool
) -> None:
    """A prolog that fails after the root was written takes it back; what the directory's owner caused is said, and is no failure."""
    config = tmp_path / "ciuic.toml"
    config.write_text(
        f'[repository]\npath = "{tmp_path}/repository"\n[daemon]\nruntime_dir = "{tmp_path}/run"\n'
    )
    for name, value in {
        "CIUIC_CONFIG": str(config), "XDG_STATE_HOME": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_UID": str(OWNER),
        "SLURM_JOB_COMMENT": f"ciuic={own}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def fail(session: object, paths: list[Path]) -> None:
        add_roots(config, [RootConfig(path) for path in paths])
        raise error

    monkeypatch.setattr("ciuic.cli.commands.protect.protect", fail)
    done = CliRunner().invoke(slurm.command, ["prolog"], obj=Session(config_option=config))
    assert (done.exit_code == 0) is is_users, done.output
    if is_users:
        assert "is not protected" in done.output
    assert not load_config(config).roots
    assert not [one for one in (tmp_path / "ciuic/slurm").rglob("*") if one.is_file()]


def test_an_epilog_ends_no_protection_that_its_prolog_did_not_begin(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prolog that met a configuration which was being edited leaves no record of a root that the operator protects."""
    config = tmp_path / "ciuic.toml"
    for name, value in {
        "CIUIC_CONFIG": str(config), "XDG_STATE_HOME": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_UID": str(OWNER),
        "SLURM_JOB_COMMENT": f"ciuic={own}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    config.write_text("[[root\n")
    _hook("prolog", config)
    config.write_text(f'[[root]]\npath = "{own}"\n[daemon]\nruntime_dir = "{tmp_path}/run"\n')
    _hook("epilog", config)
    assert [root.path for root in load_config(config).roots] == [own]

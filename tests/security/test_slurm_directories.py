"""Attacker: a user whose job names the directory that root's Prolog is to protect."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.restoring import take, write

from ciuic.cli.commands import slurm
from ciuic.cli.shared.session import Session
from ciuic.config import NoDirectory, RootConfig, add_roots, load_config
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

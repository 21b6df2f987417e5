"""git: clone of a repository on the same machine, and status of the clone with uncached names."""

from __future__ import annotations

import os
import shutil

from benchmarks.suite import Job, Suite
from benchmarks.timing import command, preparation, rate
from benchmarks.workloads.trees import make_tree

_FILES = 5_000
# The configuration of the user and of the system must not change what is measured.
_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "benchmark",
    "GIT_AUTHOR_EMAIL": "benchmark@localhost",
    "GIT_COMMITTER_NAME": "benchmark",
    "GIT_COMMITTER_EMAIL": "benchmark@localhost",
}


def _missing() -> str:
    return "" if shutil.which("git") else "git is not installed"


def _git(*arguments: str) -> None:
    command(["git", *arguments], **_ENVIRONMENT)


def _files(job: Job) -> int:
    return job.count(_FILES, 50)


def _make_repository(job: Job) -> None:
    repository = f"{job.source}/repository"
    make_tree(repository, _files(job))
    _git("-C", repository, "init", "-q")
    _git("-C", repository, "add", ".")
    _git("-C", repository, "commit", "-q", "-m", "files")


def _clear(job: Job) -> None:
    if os.path.exists(job.path("clone")):
        shutil.rmtree(job.path("clone"))


def _clone(job: Job) -> float:
    _git("clone", "-q", "--no-hardlinks", f"{job.source}/repository", job.path("clone"))
    return _files(job)


def _status(job: Job) -> float:
    _git("-C", job.path("clone"), "status", "--short")
    return _files(job)


SUITE = Suite(
    "git",
    (
        preparation(_clear),
        rate("git clone of a local repository", "files/s", _clone),
        rate("git status, uncached", "files/s", _status, before="uncached"),
    ),
    furnish_source=_make_repository,
    missing=_missing,
)

"""What every test relies on: places to work in that are always cleaned up, and a guard against what is left behind.

A test that leaves a mount, a loop device or a process behind fails, and what it left is removed, so that the next
test starts from nothing. Several suites may run on one machine at once: only what lies below this run's own
directories, or descends from this process, counts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socketserver
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from support import leftovers
from support.ci import IN_CI, needs
from support.small_disks import sharing_disk as sharing_disk

_QUIET = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture)
# No deadlines: a machine with two busy cores says nothing about the code, and timing is for benchmarks.
hypothesis.settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=_QUIET)
hypothesis.settings.register_profile(
    "ci", max_examples=50, deadline=None, suppress_health_check=_QUIET, print_blob=True
)
hypothesis.settings.register_profile(
    "torture",
    max_examples=int(os.environ.get("TORTURE_EXAMPLES", "3000")),
    deadline=None,
    suppress_health_check=_QUIET,
    print_blob=True,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))

_PR_SET_CHILD_SUBREAPER = 36


def _mounting_impossible_because() -> str:
    """Why this process cannot mount, or nothing."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as exc:
        return f"mounting needs /dev/fuse ({exc.strerror})"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    """Orphans of this run become children of this process, so that the guard sees them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    socketserver.BaseServer.handle_error = _fail_by_a_handler  # type: ignore[method-assign]


def _fail_by_a_handler(self: socketserver.BaseServer, request: object, client_address: object) -> None:
    """Let what a handler of a test's own server raises fail the test: printed, it stands in some other test's output."""
    raise  # the exception that is being handled; pytest reports what ends a thread


_INSIDE: pytest.StashKey[leftovers.Inside] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves descriptors or threads in this process: a thousand tests later select(2) or a limit fails."""
    yield
    inside = item.stash.get(_INSIDE, None)
    if inside is None or hasattr(sys, "last_value") or item.get_closest_marker("keeps_descriptors"):
        return  # the frames of a test that failed keep what it had
    getattr(item, "funcargs", {}).clear()
    if left := inside.left():
        pytest.fail(f"{item.nodeid} left behind: " + "; ".join(left), pytrace=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that mounts is skipped where nobody can mount, except in CI, where that is a failure."""
    if item.get_closest_marker("mount") is None:
        return
    needs(_mounting_impossible_because())


@pytest.fixture(scope="session")
def run_dir() -> Iterator[Path]:
    """A short-named directory for this run: unix socket paths end at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ciuic-t-", dir="/tmp"))
    yield path
    leftovers.unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_tmp(run_dir: Path) -> Iterator[Path]:
    """Like tmp_path, with a short name, and emptied of mounts before it is removed."""
    path = Path(tempfile.mkdtemp(dir=run_dir))
    yield path
    leftovers.unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fails a test that leaves a mount, a loop device or a process behind, and removes what it left."""
    below = (run_dir, tmp_path_factory.getbasetemp())
    before = leftovers.take_stock(below)
    # What fixtures of wider scopes have, there is by now.
    request.node.stash[_INSIDE] = leftovers.Inside.take()
    yield
    left = leftovers.remove_new(before, below)
    if left:
        pytest.fail(f"{request.node.nodeid} left behind: " + "; ".join(left), pytrace=False)

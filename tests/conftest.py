"""Fixtures of all tests: working places that are always cleaned up, and a guard against leftovers.

A test that leaves a mount, a loop device or a process behind fails, and what it left is removed, so that the
next test starts clean. Several suites may run on one machine at once: only what lies below this run's own
directories, or descends from this process, counts.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import socketserver
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import file_costs, last_words, leftovers
from support.ci import IN_CI, needs
from support.late_modules import torch_distributed as torch_distributed
from support.live import Questions
from support.object_servers import fault_proxy as fault_proxy
from support.object_servers import seaweedfs as seaweedfs
from support.overlay import ASKED_FOR
from support.scheduling import FilesOnce
from support.small_disks import sharing_disk as sharing_disk
from support.ssh_server import ssh_server as ssh_server
from support.warm_python import WarmPython

from ciuic.system import mountinfo

_QUIET = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture)
# No deadlines: on a machine with two busy cores they say nothing about the code; benchmarks measure time.
hypothesis.settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=_QUIET)
hypothesis.settings.register_profile(
    "ci", max_examples=30, deadline=None, suppress_health_check=_QUIET, print_blob=True
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
_OUR_SQLITE = re.compile(r"(^|/)(index(-\d+)?|cs-[0-9a-f]+)\.sqlite(-wal|-shm|-journal)?$")
_PACKAGE = str(Path(mountinfo.__file__).parents[1]) + "/"


def _mounting_impossible_because() -> str:
    """Return why this process cannot mount, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as exc:
        return f"mounting needs /dev/fuse ({exc.strerror})"
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records what each file takes."""
    parser.addoption(
        "--record-costs", action="store_true", help="write tests/costs.txt; for a run of the whole suite"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Adopt the orphans of this run, so that the guard sees them, and keep the last words of its workers."""
    if config.getoption("record_costs") and not hasattr(config, "workerinput") and ASKED_FOR == "kernel":
        config.pluginmanager.register(file_costs.Recorder())
    last_words.register(config)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.addaudithook(_forbid_files_of_sqlite)
    socketserver.BaseServer.handle_error = _fail_by_a_handler  # type: ignore[method-assign]


def _forbid_files_of_sqlite(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail where the package opens a file of SQLite's: its close(2) would drop the locks that SQLite holds on it (fcntl_locking(2))."""
    name = arguments[0] if event == "open" else None
    if isinstance(name, (str, bytes)) and _OUR_SQLITE.search(os.fsdecode(name)):
        # Beside the caller: what pathlib or shutil opens for it.
        for frame, _line in itertools.islice(traceback.walk_stack(sys._getframe(1)), 3):
            if frame.f_code.co_filename.startswith(_PACKAGE):
                raise AssertionError(f"{frame.f_code.co_name} opens {name!r} beside SQLite")


def _fail_by_a_handler(self: socketserver.BaseServer, request: object, client_address: object) -> None:
    """Let an exception in a handler of a test's own server fail the test.

    Printed, it would end in another test's output.
    """
    # The exception that is being handled; pytest reports what ends a thread.
    raise


_INSIDE: pytest.StashKey[leftovers.Inside] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves descriptors or threads in this process.

    A thousand tests later select(2) or a limit would fail.
    """
    yield
    inside = item.stash.get(_INSIDE, None)
    if inside is None or hasattr(sys, "last_value") or item.get_closest_marker("keeps_descriptors"):
        # The frames of a failed test keep their descriptors and threads.
        return
    getattr(item, "funcargs", {}).clear()
    is_unit_test = "unit" in item.path.parts
    if left := inside.left(*([leftovers.MAX_KEPT_IN_UNIT_TESTS] if is_unit_test else [])):
        pytest.fail(f"{item.nodeid} left behind: " + "; ".join(left), pytrace=False)


_MAX_LOGS = 8
_LOG_TAIL_BYTES = 6000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport | None]:
    """Report a failed test with the ends of the logs that its processes wrote: their directories are removed."""
    report: pytest.TestReport = yield
    run_dir = getattr(item, "funcargs", {}).get("run_dir")
    if report.failed and run_dir is not None:
        for log in sorted(_logs_below(run_dir, written_since=call.start))[:_MAX_LOGS]:
            tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            report.sections.append((f"log {log.relative_to(run_dir)}", tail))
    return report


def _logs_below(top: Path, written_since: float) -> Iterator[Path]:
    # Not into mounts: what serves one may hang, perhaps for the defect that failed the test.
    mounted = {mount.mount_point for mount in mountinfo.read()}
    for directory, below, files in os.walk(os.fsencode(top)):
        below[:] = [name for name in below if os.path.join(directory, name) not in mounted]
        for name in files:
            path = Path(os.fsdecode(os.path.join(directory, name)))
            if path.suffix == ".log" and path.lstat().st_mtime >= written_since and path.is_file():
                yield path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesOnce | None:
    """End a parallel run whatever becomes of its processes."""
    return FilesOnce(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the expensive files, and see that the runner of the tiers finds those of the full one."""
    for path in {item.path for item in items if item.get_closest_marker("full")}:
        if "e2e" not in path.parts and "mark.full" not in path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{path} has tests of the full tier: mark them in the file itself")
    file_costs.sort_by_cost(items, file_costs.recorded())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that mounts where mounting is impossible, except in CI, where that is a failure."""
    if item.get_closest_marker("mount") is None:
        return
    needs(_mounting_impossible_because())


@pytest.fixture(scope="session")
def run_dir() -> Iterator[Path]:
    """Return a short-named directory for this run: unix socket paths end at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ciuic-t-", dir="/tmp"))
    yield path
    leftovers.unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_tmp(run_dir: Path) -> Iterator[Path]:
    """Provide a directory like tmp_path, with a short name; unmount what is below it before its removal."""
    path = Path(tempfile.mkdtemp(dir=run_dir))
    yield path
    leftovers.unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def warm_torch() -> Iterator[WarmPython]:
    """Provide programs that find torch imported, with what its first optimizer imports."""
    with WarmPython("torch", "torch._dynamo", "ciuic.training.manager") as python:
        yield python


@pytest.fixture(scope="session")
def plain_torch() -> Iterator[WarmPython]:
    """Provide programs that find torch imported, and nothing of ciuic."""
    with WarmPython("torch", "torch._dynamo", "torch.distributed.checkpoint") as python:
        yield python


@pytest.fixture(scope="session")
def warm_questions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let tests with a daemon ask it cheaply, where there are such tests."""
    if not any(item.get_closest_marker("mount") for item in request.session.items):
        yield
        return
    with Questions.warm():
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest,
    run_dir: Path,
    warm_questions: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Fail a test that leaves a mount, a loop device or a process behind, and remove what it left."""
    below = (run_dir, tmp_path_factory.getbasetemp())
    before = leftovers.take_stock(below)
    # Resources of fixtures with wider scopes exist by now.
    request.node.stash[_INSIDE] = leftovers.Inside.take()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    # A capture in the test's own process lowers it, and all tests after it would be slow beside other processes.
    if os.getpriority(os.PRIO_PROCESS, 0) != nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    left = leftovers.remove_new(before, below)
    if left:
        pytest.fail(f"{request.node.nodeid} left behind: " + "; ".join(left), pytrace=False)

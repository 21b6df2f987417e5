"""Tests of the runner of the suite: its disk, failures looked at twice, the order of files, and an end whatever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import file_costs, suite
from support.file_costs import CHECKOUT

_FLAKY = """
import pathlib, pytest
@pytest.mark.parametrize("n", range({count}))
def test_flaky(n):
    mark = pathlib.Path(__file__).with_name(f"mark-{{n}}")
    again = mark.exists()
    mark.touch()
    assert again, "the first time"
def test_sound(): pass
"""
_DIES = """
import os
def test_dies():
    mark = pathlib.Path(__file__).with_name("died")
    if not mark.exists():
        mark.touch()
        os._exit(9)
"""
_SKIPPED = """
import pathlib, pytest
def test_skipped():
    mark = pathlib.Path(__file__).with_name("skips")
    if mark.exists():
        pytest.skip("the second time")
    mark.touch()
    assert False
"""
_BROKEN = "def test_broken(): assert False, 'always'\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a directory of tests; pytest there knows nothing of this suite."""
    monkeypatch.setenv("JOBS", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:kmock\n")
    return tmp_path


def _look(project: Path, program: str) -> list[suite.Flaky] | int:
    (project / "test_it.py").write_text(program)
    return suite.look(suite.Run(()), [], seed=7, cwd=project)


def test_what_passes_alone_is_flaky(project: Path) -> None:
    """A test that failed or whose process died, and that passes alone, is listed with the seed and its first failure."""
    found = _look(project, _FLAKY.format(count=2) + _DIES)
    assert isinstance(found, list)
    assert [one.name for one in found] == [
        "test_it.py::test_dies",
        *(f"test_it.py::test_flaky[{n}]" for n in range(2)),
    ]
    assert {one.seed for one in found} == {7}
    assert "crashed" in found[0].first_failure
    assert {one.first_failure for one in found[1:]} == {"AssertionError: the first time"}


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (_FLAKY.format(count=1) + _BROKEN, 1),
        (_FLAKY.format(count=30), 2),
        ("import nothing_of_the_kind\n", 1),
        (_SKIPPED, 1),
        ("", 5),
    ],
)
def test_what_fails_twice_fails_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: int
) -> None:
    """A broken test, many at once, a file that cannot be imported, one that is skipped then, and no test at all are failures."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    assert _look(project, program) == status


@pytest.mark.parametrize(("count", "status"), [(suite.MAX_FLAKY, 0), (suite.MAX_FLAKY + 1, 1)])
def test_flaky_tests_are_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, status: int
) -> None:
    """Flaky tests are named at the end, and more than a few fail the run."""
    found = [suite.Flaky(f"test_{n}", 7, "was late") for n in range(count)]
    monkeypatch.setattr(suite, "look", lambda *_: [found.pop()] if found else [])
    assert suite.main(["full"] * count) == status
    printed = capsys.readouterr().out
    assert all(
        f"flaky: test_{n}\n    seed 7, passed alone; first: was late\n" in printed for n in range(count)
    )


def test_slices_are_the_full_tier_beyond_the_first() -> None:
    """Each file with tests of the full tier, and each further driver, is in one slice."""
    slices = [run for number in range(1, suite.SLICES + 1) for run in suite.runs_of(f"slice-{number}")]
    files = [
        name for run in slices for name in run.arguments if run.driver == "kernel" and name.endswith(".py")
    ]
    assert len(files) == len(set(files))
    e2e = {f"tests/e2e/{path.name}" for path in (suite.CHECKOUT / "tests/e2e").glob("test_*.py")}
    assert e2e < set(files)
    assert {run.driver for run in slices} == {run.driver for run in suite.runs_of("full")}
    with pytest.raises(ValueError, match="no tier named slice-4"):
        suite.runs_of("slice-4")
    for arguments in ([], ["--durations=20"], ["test", "-x"], ["test", "-q", "--maxfail=1"]):
        assert suite.main(arguments) == 2


def test_recorded_files_exist() -> None:
    """Each recorded file exists, and the record begins with the most expensive one."""
    costs = file_costs.recorded()
    assert len(costs) > 10
    assert [str(path) for path in costs if not path.is_file()] == [], (
        "record anew: make test-full ARGS=--record-costs"
    )
    assert list(costs.values()) == sorted(costs.values(), reverse=True)


def test_the_record_of_a_run_orders_the_next(tmp_path: Path) -> None:
    """Recorded files run in the order of their seconds, slow ones that were not recorded before them, and the others last."""
    recorder = file_costs.Recorder(tmp_path / "costs.txt")
    for name, seconds in (("cheap", 2.0), ("dear", 30.0), ("dearest", 30.0), ("dearest", 20.0)):
        recorder.pytest_runtest_logreport(
            pytest.TestReport(
                f"tests/{name}.py::test", ("", 0, ""), {}, "passed", None, "call", duration=seconds
            )
        )
    recorder.pytest_sessionfinish()
    costs = file_costs.recorded(tmp_path / "costs.txt")
    assert costs == {CHECKOUT / "tests/dearest.py": 50, CHECKOUT / "tests/dear.py": 30}
    items: list[Any] = [
        SimpleNamespace(
            path=CHECKOUT / f"tests/{name}.py",
            name=name,
            get_closest_marker={"slow": name == "slow_and_new"}.get,
        )
        for name in ("cheap", "dear", "new", "slow_and_new", "dearest")
    ]
    file_costs.sort_by_cost(items, costs)
    assert [item.name for item in items] == ["slow_and_new", "dearest", "dear", "cheap", "new"]


_CONFTEST = """
from support.scheduling import FilesOnce
def pytest_xdist_make_scheduler(config, log): return FilesOnce(config, log)
"""
_SOUND = """
def test_{}(): print(file=open("run", "a"))
"""
_DEADLY = """
def test_{}():
    print(file=open("run", "a"))
    import os; os._exit(1)
"""


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(["s", "s", "s", "sd"], id="the-last"),
        pytest.param(["s", "s", "s", "sds"], id="one-is-left"),
        pytest.param(["d", "ss", "s", "s", "s"], id="the-first"),
        pytest.param(["sd", "d", "ds"], id="one-in-each-file"),
        pytest.param(["ddd"], id="all-of-one-file"),
    ],
)
def test_a_run_ends_when_processes_die(tmp_path: Path, files: list[str]) -> None:
    """Each test is run once; those in which a process died have failed, the others passed."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    for number, kinds in enumerate(files):
        tests = [(_DEADLY if kind == "d" else _SOUND).format(at) for at, kind in enumerate(kinds)]
        (tmp_path / f"test_{number}.py").write_text("".join(tests))
    options = ["-n2", "--dist=loadfile", "--no-loadscope-reorder", "-p", "no:randomly", "-p", "no:kmock"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT / "tests"), "TMPDIR": str(tmp_path)}
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    every = "".join(files)
    passed = f", {every.count('s')} passed" if "s" in every else ""
    assert f"{every.count('d')} failed{passed} in " in outcome.stdout, outcome.stdout
    assert (tmp_path / "run").read_text() == "\n" * len(every)


_HANGS = """
import subprocess, threading
def wait_for_ever(): threading.Event().wait()
def test_it():
    # It ends with its standard input, when this process does.
    with subprocess.Popen(["cat", "-"], stdin=subprocess.PIPE):
        wait_for_ever()
"""
_CRASHES = """
import ctypes
def read_from_nowhere(): ctypes.string_at(0)
def test_it(): read_from_nowhere()
"""
_IS_KILLED = """
import os, signal
def test_it(): os.kill(os.getpid(), signal.SIGKILL)
"""
_DYING_CONFTEST = """
from support import last_words
def pytest_configure(config): last_words.register(config)
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_HANGS, ["longer than its 1 s", "in wait_for_ever", "in test_it", " S ", "cat -"]),
        (_CRASHES, ["SIGSEGV", "Segmentation fault", "in read_from_nowhere"]),
        (_IS_KILLED, ["killed by SIGKILL"]),
    ],
    ids=["hangs", "crashes", "is-killed"],
)
def test_last_words_are_the_end_of_the_report(tmp_path: Path, program: str, words: list[str]) -> None:
    """The stacks of a worker that died, and its children where its time was up, come after everything else."""
    (tmp_path / "conftest.py").write_text(_DYING_CONFTEST)
    (tmp_path / "test_dying.py").write_text(program + "\ndef test_sound(): pass\n")
    outcome = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n1",
            "-ra",
            "--timeout=1",
            "--timeout-method=thread",
            "-p",
            "no:randomly",
            "-p",
            "no:kmock",
        ],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join((str(CHECKOUT), str(CHECKOUT / "tests"))),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    everything_else, _, end = outcome.stdout.partition("short test summary info")
    assert "crashed while running 'test_dying.py::test_it'" in everything_else, (
        outcome.stdout + outcome.stderr
    )
    _, title, last = end.partition("last words of gw0")
    assert title, outcome.stdout
    for expected in ["test_dying.py::test_it", *words]:
        assert expected in last, outcome.stdout
    # What called the test is no news.
    assert "pluggy" not in last
    assert "1 failed, 1 passed" in last
    assert list(tmp_path.glob("ciuic-last-words-*")) == []


WITH_TEST_DISK = Path(__file__).parents[3] / ".ci/with-test-disk"


def with_test_disk(
    script: str, place: Path, *, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    """Run a shell script from a checkout at ``place``, in whose directory ``images`` the disk has its file."""
    (place / "images").mkdir()
    return subprocess.run(
        [WITH_TEST_DISK, "/bin/sh", "-c", script],
        cwd=place,
        env={"PATH": path, "TMPDIR": str(place / "images")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.mount
def test_a_program_has_a_disk_of_its_own_at_tmp(short_tmp: Path) -> None:
    """A program finds an empty ext4 at /tmp, its current directory as it was, and leaves neither mount, device nor file."""
    inside = """
        stat --file-system --format %T /tmp
        ls /tmp --ignore $(basename $PYTEST_DEBUG_TEMPROOT)
        touch /tmp/within kept
        ls images
        echo ${TMPDIR-none}
    """
    ran = with_test_disk(inside, short_tmp)
    assert ran.stderr == ""
    assert ran.stdout.split() == ["ext2/ext3", short_tmp.relative_to("/tmp").parts[0], "lost+found", "none"]
    assert not Path("/tmp/within").exists()
    assert sorted(path.name for path in short_tmp.iterdir()) == ["images", "kept"]


@pytest.mark.mount
@pytest.mark.parametrize("lacking", ["unshare", "mkfs.ext4", "losetup", "mount"])
def test_a_program_runs_where_no_disk_can_be_had(short_tmp: Path, lacking: str) -> None:
    """A program runs without a disk, after a sentence, where a step of making one fails; nothing is left."""
    fails = short_tmp / "bin" / lacking
    fails.parent.mkdir()
    fails.write_text("#!/bin/sh\necho not here; exit 1\n")
    fails.chmod(0o755)
    ran = with_test_disk("echo ran", short_tmp, path=f"{fails.parent}:{os.environ['PATH']}")
    assert ran.stdout == "ran\n"
    assert ran.stderr.startswith("ciuic: tests wait for this machine's disk and take longer: no ")
    assert list((short_tmp / "images").iterdir()) == []

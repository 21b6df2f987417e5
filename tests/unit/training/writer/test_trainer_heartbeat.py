"""Heartbeat page of a manager: beats while the training goes on, and how it ended."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from support.served_sockets import RegistrationListener
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.errors import CiuicError
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatReading, read_losses, read_page
from ciuic.repository import Repository
from ciuic.training import ManagerOptions
from ciuic.training.save_pipeline import SavePipeline
from ciuic.training.writer.heartbeat import TrainerHeartbeat


def reading_of(heartbeat: TrainerHeartbeat) -> HeartbeatReading:
    _, page = heartbeat.fds
    return read_page(page)


def test_steps_reports_and_saves_are_beats(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, reports and saves beat on the page that a daemon gets; closing the manager says goodbye."""
    (short_tmp / "ciuic.toml").write_text(f'[daemon]\nruntime_dir = "{short_tmp}"\n')
    monkeypatch.setenv("CIUIC_CONFIG", str(short_tmp / "ciuic.toml"))
    with RegistrationListener(short_tmp) as daemon:
        manager = SnapshotManager(short_tmp / "s", options=ManagerOptions(heartbeat_seconds=5))
        manager.report(loss=1.0)
        manager.save_snapshot(table={"a": 1}, step=7)
        manager.report(loss=0.5)
        with daemon.accept() as (hello, (_, page)):
            assert (hello.name, hello.heartbeat_seconds, hello.where) == (
                "training",
                5.0,
                str(short_tmp / "s"),
            )
            assert read_page(page)[:2] == (3, 7)
            assert read_page(page).goodbye is Goodbye.NONE
            assert read_losses(page, 0) == (2, ((0, 1.0), (7, 0.5)))
            manager.close()
            assert read_page(page).goodbye is Goodbye.CLOSED


def test_page_says_when_a_save_or_a_restore_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says so while a state is gathered into an arena, awaited and put back, and not after."""
    manager = SnapshotManager(tmp_path)
    model = Model()
    manager.register(model=model)
    seen = []

    def busy() -> bool:
        seen.append(reading_of(manager._coordinator.heartbeat).busy)
        return seen[-1]

    client = manager._coordinator.pipeline.client
    reserve, listen, load = client.reserve, client.listen, model.load_state_dict
    monkeypatch.setattr(client, "reserve", lambda size: (busy(), reserve(size))[1])
    monkeypatch.setattr(client, "listen", lambda seconds: (busy(), listen(seconds))[1])
    monkeypatch.setattr(model, "load_state_dict", lambda state: (busy(), load(state))[1])
    manager.save_snapshot(wait=True)
    manager.resume()
    assert len(seen) >= 3
    assert all(seen)
    busy()
    assert not seen[-1]
    manager.close()


def test_page_says_when_a_state_is_loaded_by_name_compared_or_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says so whichever way the program asks for a state that was saved: all of them may take longer than a step."""
    seen = []
    with SnapshotManager(tmp_path) as manager:
        manager.save_snapshot(table={"a": 1}, step=1, wait=True)
        opened = Repository.open

        def opening(*args: object, **kwargs: object) -> Repository:
            seen.append(reading_of(manager._coordinator.heartbeat).busy)
            return opened(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(Repository, "open", opening)
        for look in (
            lambda: manager.load_snapshot(step=1),
            manager.load_best,
            lambda: manager.diff("latest", "latest"),
            lambda: manager.export(tmp_path / "out.npz", to="npz"),
        ):
            seen.clear()
            # What they find is not the matter here.
            with suppress(CiuicError):
                look()
            assert seen
            assert all(seen)
        assert not reading_of(manager._coordinator.heartbeat).busy


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_that_a_library_uses_stays_its_own(when: str) -> None:
    """A handler that a library of the process installs is called before and after the page is closed, whichever came first."""
    program = """
import ctypes, signal, sys
from ciuic.protocol.heartbeat_page import STACKS_SIGNAL, HeartbeatPage, read_page
def install():
    signal_ = ctypes.CDLL(None).signal
    signal_.restype, signal_.argtypes = ctypes.c_void_p, (ctypes.c_int, type(handler))
    signal_(STACKS_SIGNAL, handler)
seen = []
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(seen.append)
if sys.argv[1] == "before":
    install()
page = HeartbeatPage()
page.append_stacks_at_signal()
print(read_page(page.fd).dumps)
if sys.argv[1] == "after":
    install()
signal.raise_signal(STACKS_SIGNAL)
page.close()
signal.raise_signal(STACKS_SIGNAL)
print(len(seen))
# Closed by the end of the interpreter.
left = HeartbeatPage()
left.append_stacks_at_signal()
"""
    done = subprocess.run((sys.executable, "-c", program, when), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [str(when == "after"), "2"], "")


def test_evaluation_is_a_beat_after_the_first_step(tmp_path: Path) -> None:
    """Batches of an evaluation beat, but not before the first step, which may have to be compiled."""
    with SnapshotManager(tmp_path) as manager:
        optimizer = Optimizer(Model())
        manager.register(optimizer=optimizer)
        manager.framework.evaluates()
        assert reading_of(manager._coordinator.heartbeat).beats == 0
        optimizer.step()
        before = reading_of(manager._coordinator.heartbeat)
        manager.framework.evaluates()
        after = reading_of(manager._coordinator.heartbeat)
        assert (after.beats, after.step) == (before.beats + 1, before.step)


def test_saves_that_fail_are_counted_until_one_succeeds(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves that a rule asks for and that fail are on the page with the reason, whichever way they fail, until one is durable."""
    (short_tmp / "ciuic.toml").write_text(f'[daemon]\nruntime_dir = "{short_tmp}"\n')
    monkeypatch.setenv("CIUIC_CONFIG", str(short_tmp / "ciuic.toml"))
    monkeypatch.setattr(SavePipeline, "_back_off", lambda self: None)
    with RegistrationListener(short_tmp) as daemon:
        manager = SnapshotManager(short_tmp / "s", every_steps=1)
        model = Model()
        gathered = model.state_dict
        optimizer = Optimizer(model)
        manager.register(model=model, optimizer=optimizer)

        def refuse() -> NoReturn:
            raise RuntimeError("no state now")

        def no_memory(*_: object, **__: object) -> NoReturn:
            raise OSError(errno.ENOMEM, "out of memory")

        with daemon.accept() as (_, (_, page)):
            model.state_dict = refuse  # type: ignore[method-assign]
            optimizer.step()
            optimizer.step()
            first = read_page(page)
            assert (first.failed_saves, first.save_error) == (2, "no state now")
            model.state_dict = gathered  # type: ignore[method-assign]
            with monkeypatch.context() as patched:
                patched.setattr("ciuic.training.save_pipeline.SavePipeline._copy_to_arena", no_memory)
                optimizer.step()
            found = read_page(page)
            assert (found.failed_saves, found.save_error) == (3, "out of memory")
            assert found.failing_since_ns == first.failing_since_ns > 0
            optimizer.step()
            with suppress(RuntimeError):  # the program hears of what its object raised
                manager.wait()
            assert read_page(page).failed_saves == 0
            manager.close()


@pytest.mark.parametrize(
    ("error", "goodbye", "reason"),
    [
        (None, Goodbye.CLOSED, ""),
        (ValueError("x"), Goodbye.FAILED, "ValueError: x"),
        (SystemExit(3), Goodbye.FAILED, "ended with status 3"),
        (SystemExit(0), Goodbye.CLOSED, ""),
        (KeyboardInterrupt(), Goodbye.CLOSED, ""),
    ],
)
def test_an_end_by_an_exception_is_no_goodbye(
    error: BaseException | None, goodbye: Goodbye, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception counts as a failure, except those by which the user or the program ends the run."""
    # What it registers stays registered where the end was a failure, and would keep the page open.
    monkeypatch.setattr("atexit.register", lambda function: function)
    heartbeat = TrainerHeartbeat("t", "/w", None)
    heartbeat.closing(error)
    assert (reading_of(heartbeat).goodbye, reading_of(heartbeat).reason) == (goodbye, reason)


def test_preemption_is_a_goodbye_that_stays_unless_the_training_goes_on() -> None:
    """A goodbye for preemption outlasts the exit that follows; a beat takes it back."""
    heartbeat = TrainerHeartbeat("t", "/w", None)
    heartbeat.preempted()
    heartbeat.closing(SystemExit(143))
    assert reading_of(heartbeat).goodbye is Goodbye.PREEMPTED
    heartbeat.beat(3)
    assert reading_of(heartbeat).goodbye is Goodbye.NONE
    heartbeat.closing(None)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_heartbeat_that_cannot_be_meant_is_refused(tmp_path: Path, seconds: float) -> None:
    """An invalid heartbeat_seconds is refused at once, by name."""
    with pytest.raises(ValueError, match="heartbeat_seconds"):
        SnapshotManager(tmp_path / "s", options=ManagerOptions(heartbeat_seconds=seconds))


_PROGRAM = """
import atexit, os, sys
from ciuic.training.writer.heartbeat import TrainerHeartbeat
from ciuic.protocol.heartbeat_page import read_page
out = os.dup(1)
# Registered before the heartbeat, and so called after it: what is registered last is called first.
atexit.register(lambda: os.write(out, read_page(copy).goodbye.name.encode()))
heartbeat = TrainerHeartbeat("t", "/w", None)
copy = os.dup(heartbeat.fds[1])
{end}
"""


@pytest.mark.parametrize(
    ("end", "goodbye"),
    [
        ("pass", "CLOSED"),
        ("raise ValueError('x')", "FAILED"),
        ("raise KeyboardInterrupt", "CLOSED"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    heartbeat.closing(sys.exc_info()[1])", "CLOSED"),
        (
            "if not os.fork():\n    sys.exit(0)\nos.wait()\nos.write(out, b'child left it ' )",
            "child left it CLOSED",
        ),
    ],
)
def test_only_an_uncaught_exception_is_a_failure(end: str, goodbye: str) -> None:
    """A caught exception is no failure, an uncaught one is; a forked child says nothing."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM.format(end=end)], capture_output=True, check=False)
    assert done.stdout.decode().removeprefix("NONE") == goodbye, done.stderr.decode()

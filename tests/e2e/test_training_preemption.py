"""A training that is told to go leaves a last snapshot, wherever it is, and goes on from it to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ciuic import SnapshotManager

SUPPORT = Path(__file__).parents[1] / "support"


def _run(
    where: Path, tell: str, *, grace_seconds: float = 60, then: str = "as before"
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(SUPPORT / "preempted_training.py")]
    return subprocess.run(
        [*program, str(where), str(where) + ".result", tell, str(grace_seconds), then],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _steps(where: Path) -> list[tuple[int | None, str]]:
    with SnapshotManager(where) as manager:
        return [(one.facts.step, one.facts.reason) for one in manager.list_snapshots()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What comes out when nothing happens."""
    pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    where = tmp_path_factory.mktemp("whole") / "snapshots"
    done = _run(where, "never")
    assert done.returncode == 0, done.stderr
    return Path(f"{where}.result").read_text()


@pytest.mark.parametrize(
    ("tell", "then", "code", "step"),
    [
        ("step:4", "as before", 128 + signal.SIGTERM, 4),
        ("step:8", "call", 3, 8),
        ("evaluation:0", "as before", 128 + signal.SIGTERM, 6),
        ("evaluation:1", "exit", 75, 12),
    ],
)
def test_a_run_that_was_told_to_go_ends_with_the_bits_of_one_that_was_not(
    whole: str, tmp_path: Path, tell: str, then: str, code: int, step: int
) -> None:
    """The step that was begun is finished first; within an evaluation the state before it is saved, and it is made again."""
    where = tmp_path / "snapshots"
    told = _run(where, tell, then=then)
    assert told.returncode == code, told.stderr
    if then == "call":
        assert told.stdout == "called SIGTERM True\n"
    assert _steps(where) == [(step, "SIGTERM")]
    again = _run(where, "never")
    assert again.returncode == 0, again.stderr
    assert Path(f"{where}.result").read_text() == whole


def test_the_program_goes_on_if_it_wants_to(whole: str, tmp_path: Path) -> None:
    """And what it computes does not change."""
    where = tmp_path / "snapshots"
    told = _run(where, "evaluation:0", then="continue")
    assert told.returncode == 0, told.stderr
    assert _steps(where) == [(6, "SIGTERM")]
    assert Path(f"{where}.result").read_text() == whole


NUMPY_HEAD = """
    import logging, os, signal, sys, time
    from support.tiny_training import Model, Optimizer
    from ciuic import SnapshotManager
    from ciuic.training import BeforePreemption, Metadata
    model = Model(); optimizer = Optimizer(model)
    def manage(rule):
        manager = SnapshotManager(sys.argv[1], save_when=[rule])
        manager.register(model=model, optimizer=optimizer)
        return manager
"""


def _program(text: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NUMPY_HEAD) + textwrap.dedent(text), *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parent)},
    )


def test_what_was_there_before_is_called_after_the_snapshot_is_staged(tmp_path: Path) -> None:
    """A program's own way to end, once; and closing puts it back."""
    done = _program(
        """
        signal.signal(signal.SIGUSR1, lambda number, frame: print("before", manager.stats.saved, flush=True))
        own = signal.getsignal(signal.SIGUSR1)
        manager = manage(BeforePreemption())
        optimizer.step()
        manager.wait()
        optimizer.step()
        os.kill(os.getpid(), signal.SIGUSR1)
        print("between", flush=True)
        optimizer.step()
        manager.close()
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        """,
        str(tmp_path / "snapshots"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["between", "before 1"]
    assert _steps(tmp_path / "snapshots") == [(3, "SIGUSR1")]


def test_without_time_it_is_left_out_and_said(tmp_path: Path) -> None:
    """What was measured decides; and where no step ends in time the program ends all the same."""
    done = _program(
        """
        manager = manage(BeforePreemption(grace_seconds=5, signals=[signal.SIGTERM, signal.SIGUSR1]))
        optimizer.step()
        manager._saver.costs.measured_bytes_per_second = 1000.0
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            optimizer.step()
        except SystemExit as end:
            print("ended", end.code, manager.stats.saved, flush=True)
        """,
        str(tmp_path / "snapshots"),
    )
    assert done.stdout == "ended 143 0\n", done.stderr
    assert "no snapshot before SIGTERM: it takes" in done.stderr
    done = _program(
        """
        manager = manage(BeforePreemption(grace_seconds=1.5))
        optimizer.step()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # a step that hangs
        """,
        str(tmp_path / "hanging"),
    )
    assert done.returncode == 143, done.stderr
    assert "no step was over in time" in done.stderr


def test_a_forked_child_answers_signals_as_if_nothing_watched(tmp_path: Path) -> None:
    """Workers of data loaders are ended by SIGTERM."""
    done = _program(
        """
        manager = manage(BeforePreemption())
        optimizer.step()
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(1)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        manager.close()
        """,
        str(tmp_path / "snapshots"),
    )
    assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr


def test_a_notice_of_the_cloud_leads_to_a_snapshot_and_the_run_goes_on(tmp_path: Path) -> None:
    """Found by the writer, told by a signal that harms nobody; the program goes on until the machine goes."""
    done = _program(
        """
        import json, threading
        from http.server import BaseHTTPRequestHandler, HTTPServer
        class Service(BaseHTTPRequestHandler):
            def do_GET(self):
                text = "name" if "instance" in self.path else json.dumps({"Events": [
                    {"EventId": "1", "EventType": "Preempt", "Resources": ["name"], "NotBefore": ""}]})
                self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
            def log_message(self, *args): pass
        server = HTTPServer(("127.0.0.1", 0), Service)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        manager = manage(BeforePreemption(clouds=[Metadata("azure", f"http://127.0.0.1:{server.server_address[1]}", 0.05)]))
        end = time.monotonic() + 60
        while not manager.stats.saved and time.monotonic() < end:
            optimizer.step()
            time.sleep(0.05)
        manager.close()
        print(manager.stats.saved, flush=True)
        """,
        str(tmp_path / "snapshots"),
    )
    assert done.stdout == "1\n", done.stderr
    assert [reason for _, reason in _steps(tmp_path / "snapshots")] == ["Azure: Preempt"]


def test_ranks_go_together(tmp_path: Path) -> None:
    """A rank that was not told saves at the boundary at which the others do."""
    done = _program(
        """
        asked = []
        manager = SnapshotManager(sys.argv[1], save_when=[BeforePreemption(then="exit", exit_code=9)],
                                  agree=lambda told: asked.append(told) or len(asked) == 3)
        manager.register(model=model, optimizer=optimizer)
        try:
            while True: optimizer.step()
        except SystemExit as end:
            print(end.code, asked, flush=True)
        """,
        str(tmp_path / "snapshots"),
    )
    assert done.stdout == "9 [False, False, False]\n", done.stderr
    assert _steps(tmp_path / "snapshots") == [(3, "another rank was told")]

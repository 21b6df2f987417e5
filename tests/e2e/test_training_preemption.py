"""A training that is signalled to end leaves a last snapshot wherever it is, and resumes to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.warm_python import WarmPython

from ciuic import SnapshotManager

SUPPORT = Path(__file__).parents[1] / "support"


def _run(
    python: WarmPython, where: Path, tell: str, *, grace_seconds: float = 60, then: str = "as before"
) -> subprocess.CompletedProcess[str]:
    program = SUPPORT / "preempted_training.py"
    return python.run([program, where, f"{where}.result", tell, grace_seconds, then], timeout=120)


def _steps(where: Path) -> list[tuple[int | None, str]]:
    with SnapshotManager(where) as manager:
        return [(one.facts.step, one.facts.reason) for one in manager.list_snapshots()]


@pytest.fixture(scope="module")
def uninterrupted(warm_torch: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the result of a run that is not interrupted."""
    pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    where = tmp_path_factory.mktemp("whole") / "snapshots"
    done = _run(warm_torch, where, "never")
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
def test_a_preempted_run_ends_with_the_bits_of_an_uninterrupted_one(
    warm_torch: WarmPython, uninterrupted: str, tmp_path: Path, tell: str, then: str, code: int, step: int
) -> None:
    """The open step is finished before the last snapshot; an interrupted evaluation is repeated."""
    where = tmp_path / "snapshots"
    result = _run(warm_torch, where, tell, then=then)
    assert result.returncode == code, result.stderr
    if then == "call":
        assert result.stdout == "called SIGTERM True\n"
    assert _steps(where) == [(step, "SIGTERM")]
    again = _run(warm_torch, where, "never")
    assert again.returncode == 0, again.stderr
    assert Path(f"{where}.result").read_text() == uninterrupted


def test_the_program_goes_on_if_it_wants_to(
    warm_torch: WarmPython, uninterrupted: str, tmp_path: Path
) -> None:
    """The program goes on with then="continue" and computes the same."""
    where = tmp_path / "snapshots"
    result = _run(warm_torch, where, "evaluation:0", then="continue")
    assert result.returncode == 0, result.stderr
    assert _steps(where) == [(6, "SIGTERM")]
    assert Path(f"{where}.result").read_text() == uninterrupted


NUMPY_HEAD = """
    import logging, os, signal, sys, time
    from support.tiny_training import Model, Optimizer
    from ciuic import SnapshotManager
    from ciuic.training import BeforePreemption, ManagerOptions, MetadataService
    from ciuic.training.save_schedule import SaveCosts
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


def test_an_earlier_signal_handler_runs_after_the_staging(tmp_path: Path) -> None:
    """A handler of the program is called once, after the staging; closing the manager restores it."""
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


def test_a_save_without_enough_time_is_left_out_and_logged(tmp_path: Path) -> None:
    """A save is left out, with a log line, if by measurement or by deadline there is not enough time."""
    done = _program(
        """
        manager = manage(BeforePreemption(grace_seconds=5, signals=[signal.SIGTERM, signal.SIGUSR1]))
        optimizer.step()
        SaveCosts.write_estimate_seconds = lambda *_: 60.0
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
    assert "no snapshot before SIGTERM: writing takes" in done.stderr
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
    assert "no step ended within the grace period" in done.stderr


def test_a_forked_child_answers_signals_as_if_nothing_watched(tmp_path: Path) -> None:
    """A forked child, such as a data loader's worker, is ended by SIGTERM."""
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
    """The writer finds a notice and signals the trainer, which saves and goes on."""
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
        manager = manage(BeforePreemption(clouds=[MetadataService("azure", f"http://127.0.0.1:{server.server_address[1]}", 0.05)]))
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


def test_ranks_save_at_the_same_boundary(tmp_path: Path) -> None:
    """All ranks save at the same boundary when one of them is signalled to end."""
    done = _program(
        """
        asked = []
        manager = SnapshotManager(sys.argv[1], save_when=[BeforePreemption(then="exit", exit_code=9)],
                                  options=ManagerOptions(agree=lambda told: asked.append(told) or len(asked) == 3))
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

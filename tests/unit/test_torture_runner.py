"""The torture runner: what is registered can be run, and a broken promise is what the exit status says."""

from __future__ import annotations

import importlib

import pytest
from torture import __main__ as runner
from torture import syncs
from torture.figure import Figure


def test_every_registered_torture_has_a_run() -> None:
    """A line in TORTURES names a module of the folder with the function that the contract asks for."""
    for torture in runner.TORTURES:
        assert callable(importlib.import_module(f"torture.{torture.module}").run)


def test_one_broken_promise_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has every figure, the text of what failed is printed, and the status is 1; else 0."""
    good, bad = Figure("snapshots checked", 1200), Figure("promises kept", 3, ("one was lost",))
    assert runner._print_table([("cut", good)], 7) == 0
    assert runner._print_table([("cut", good), ("crash", bad)], 7) == 1
    shown = capsys.readouterr().out
    assert "1,200" in shown
    assert "FAILED crash, promises kept: one was lost" in shown


def test_every_sync_has_a_mutation() -> None:
    """A sync in the code that `make torture ARGS=syncs` would not leave out is one whose loss nobody is known to notice."""
    assert syncs.without_mutation() == []

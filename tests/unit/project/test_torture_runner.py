"""Tests that every registered torture can be run, and that its result is the exit status."""

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


def test_one_failure_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure makes the status 1 and prints its text, and the table has every figure."""
    good, bad = Figure("snapshots checked", 1200), Figure("promises kept", 3, ("one was lost",))
    assert runner._print_table([("cut", good)], 7) == 0
    assert runner._print_table([("cut", good), ("crash", bad)], 7) == 1
    shown = capsys.readouterr().out
    assert "1,200" in shown
    assert "FAILED crash, promises kept: one was lost" in shown


def test_every_sync_has_a_mutation() -> None:
    """Every sync in the code is left out by `make torture ARGS=syncs`, so its loss would be noticed."""
    assert syncs.without_mutation() == []

"""Tests that every registered torture can be run, with its result as the exit status, and that each mutant still fits the code."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
from mutants import MUTANTS
from torture import __main__ as runner
from torture import syncs
from torture.figure import Figure
from torture.mutants import CHECKOUT


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


def test_every_mutant_fits_its_file() -> None:
    """What a mutant replaces occurs once in its file, which compiles with the fault and is another one then."""
    for mutant in MUTANTS:
        text = (CHECKOUT / mutant.path).read_text()
        mutated = mutant.applied(text)
        assert compile(mutated, mutant.path, "exec").co_code is not None
        assert mutated != text


def test_every_mutant_has_a_name_and_tests_of_its_own() -> None:
    """Names are unique, and so are faults; the tests that must notice a fault exist."""
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len({(mutant.path, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert {
        test for one in MUTANTS for test in one.tests if not Path(CHECKOUT, test.split("::")[0]).exists()
    } == set()


def test_mutants_run_only_where_they_are_named() -> None:
    """A run of all tortures leaves the mutants out, which take an hour; one that names them has them."""
    assert "mutants" not in [torture.module for torture in runner.chosen([])]
    assert [torture.module for torture in runner.chosen(["mutants"])] == ["mutants"]

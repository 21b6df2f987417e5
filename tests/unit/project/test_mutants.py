"""Tests that each fault of the collection of mutants still fits the code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mutants import MUTANTS
from torture import __main__ as runner
from torture.mutants import CHECKOUT


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

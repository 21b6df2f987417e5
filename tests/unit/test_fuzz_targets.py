"""Every decoder that an attacker reaches has a fuzz target, and every target is a decoder."""

from __future__ import annotations

import pytest
from support.decoders import OURS, READERS, modules_that_decode
from support.fuzz import fill
from support.readers import readers
from torture import fuzz

MADE_OF_OTHERS = {
    "block map": "ciuic/repository/blockmaps.py cuts ids out of bytes, without a decoding call",
    "compressed chunk": "zstandard, called by ciuic/repository/chunks.py",
    "configuration": "ciuic/config/toml_source.py, with a parser of its own",
    "flat configuration": "ciuic/config/flat.py, likewise",
    "mounts of a process": "ciuic/mountinfo.py splits lines",
}


def test_every_decoder_is_registered() -> None:
    """A module with a decoding call is in the list, with its readers or with who writes what it reads; nothing else is."""
    assert modules_that_decode() == READERS.keys() | OURS.keys()
    assert not READERS.keys() & OURS.keys()


def test_every_reader_stands_for_a_decoder() -> None:
    """The names in the list are those of the readers, which are the fuzz targets."""
    named = {name for names in READERS.values() for name in names}
    there = {reader.name for reader in readers()}
    assert named <= there | {"DCP metadata"}  # where torch is not installed
    assert there <= named | MADE_OF_OTHERS.keys()


def test_the_readers_have_names_of_their_own() -> None:
    """They choose the corpus of a target, and the files of regressions begin with one."""
    names = [reader.name for reader in readers()]
    assert len(names) == len(set(names))


def test_a_corpus_has_the_target_only(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Of one target the corpus has its own valid input and its regressions."""
    assert fill(tmp_path / "one", "mark of a restore") >= 2
    assert fill(tmp_path / "all") > len(readers())


def test_figures_are_read_from_what_the_fuzzer_says() -> None:
    """Executions, corpus and coverage of the last line that has them."""
    said = "#2\tINITED cov: 3 ft: 4 corp: 1/1b\n#900\tNEW    cov: 345 ft: 678 corp: 12/345b lim: 4\nstat::number_of_executed_units: 90210\n"
    assert fuzz.figures_in(said) == (90210, 12, 345)
    assert fuzz.figures_in("") == (0, 0, 0)


def test_the_time_is_shared_or_each_has_its_own() -> None:
    """Short runs have one process for all targets, since each start takes seconds; `--each` gives every target the same time."""
    assert fuzz.chosen(30.0) == [""]
    assert fuzz.chosen(3600.0 * len(readers())) == [reader.name for reader in readers()]


@pytest.mark.parametrize("name", ["no such target"])
def test_an_unknown_target_is_named(name: str) -> None:
    """Not silently another one."""
    from support.fuzz import target

    with pytest.raises(ValueError, match=name):
        target(name)

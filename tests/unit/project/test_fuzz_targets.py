"""Tests that every decoder an attacker reaches has a fuzz target, and every target is a decoder."""

from __future__ import annotations

import pytest
from support.decoders import OURS, READERS, modules_that_decode
from support.fuzz import fill
from support.readers import readers
from torture import fuzz

MADE_OF_OTHERS = {
    "block map": "ciuic/repository/block_maps.py cuts ids out of bytes, without a decoding call",
    "compressed chunk": "zstandard, called by ciuic/repository/chunk_reader.py",
    "configuration": "ciuic/config/toml_source.py, with a parser of its own",
    "flat configuration": "ciuic/config/flat.py, likewise",
    "text of a key": "ciuic/remote/sealing/key_slots.py, with bytes.fromhex and base64",
    "mounts of a process": "ciuic/system/mountinfo.py splits lines",
}


def test_every_decoder_is_registered() -> None:
    """The list has exactly the modules with a decoding call, with readers or the writer of their input."""
    assert modules_that_decode() == READERS.keys() | OURS.keys()
    assert not READERS.keys() & OURS.keys()


def test_every_reader_stands_for_a_decoder() -> None:
    """The names in the list are those of the readers, which are the fuzz targets."""
    named = {name for names in READERS.values() for name in names}
    there = {reader.name for reader in readers()}
    # The DCP metadata has no reader where torch is not installed.
    assert named <= there | {"DCP metadata"}
    assert there <= named | MADE_OF_OTHERS.keys()


def test_the_readers_have_names_of_their_own() -> None:
    """Reader names are unique, as they select corpora and are prefixes of regression files."""
    names = [reader.name for reader in readers()]
    assert len(names) == len(set(names))


def test_a_corpus_has_the_target_only(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The corpus of a target has its own valid input and its regressions."""
    assert fill(tmp_path / "one", "mark of a restore") >= 2
    assert fill(tmp_path / "all") > len(readers())


def test_figures_are_read_from_the_output_of_the_fuzzer() -> None:
    """Executions, corpus and coverage are read from the last line that has them."""
    output = "#2\tINITED cov: 3 ft: 4 corp: 1/1b\n#900\tNEW    cov: 345 ft: 678 corp: 12/345b lim: 4\nstat::number_of_executed_units: 90210\n"
    assert fuzz.figures_in(output) == (90210, 12, 345)
    assert fuzz.figures_in("") == (0, 0, 0)


def test_the_time_is_shared_or_each_has_its_own() -> None:
    """Short runs share one process for all targets; `--each` gives every target the same time.

    Each start takes seconds.
    """
    assert fuzz.chosen(30.0) == [""]
    assert fuzz.chosen(3600.0 * len(readers())) == [reader.name for reader in readers()]


@pytest.mark.parametrize("name", ["no such target"])
def test_an_unknown_target_is_named(name: str) -> None:
    """An unknown target is an error that names it."""
    from support.fuzz import target

    with pytest.raises(ValueError, match=name):
        target(name)

"""Checkpoints made to cost those who judge them: each has a budget, and none ends the look at the others."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.checkpoint_files import MemoryDirectory, MemoryFile
from support.restoring import take

from ciuic.cli.app import cli
from ciuic.repository import Repository
from ciuic.verdicts import model, verdict
from ciuic.verdicts.formats.pickles import PickleStream
from ciuic.verdicts.model import DEFECT, BoundedReader, Piece, Structure
from ciuic.verdicts.sources import DirectorySource
from ciuic.verdicts.verdict import checkpoints_in, judge_file, judge_structure

_NAMES = 4 << 20


def _npy(header: str) -> bytes:
    data = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data)) + data


def _impossible_array() -> bytes:
    """Make an array of which one item has more bytes than a number of 4,300 digits can say."""
    described = "'<f4'"
    for _ in range(8):
        described = f"[('a',{described},({','.join(['4294967295'] * 60)}))]"
    return _npy(f"{{'descr':{described},'fortran_order':False,'shape':(2,)}}")


def _hdf5_of_one_long_name() -> bytes:
    """Make a group of 2,000,000 names, each of which is as long as its table of names."""
    size = 4096 + 2 * _NAMES + (1 << 20)
    data = bytearray(size)
    data[:8] = b"\x89HDF\r\n\x1a\n"
    data[13:15] = b"\x08\x08"
    data[24:32], data[40:48], data[64:72] = (struct.pack("<Q", one) for one in (0, size, 4096))
    message = struct.pack("<HHB3xQQ", 0x11, 16, 0, 8192, 16384)
    data[4096:4112] = struct.pack("<BBHII4x", 1, 0, 1, 1, len(message))
    data[4112 : 4112 + len(message)] = message
    data[16384:16416] = b"HEAP\0\0\0\0" + struct.pack("<QQQ", _NAMES, 1, 1 << 20)
    data[1 << 20 : (1 << 20) + _NAMES] = b"x" * (_NAMES - 1) + b"\0"
    data[8192:8216] = b"TREE\0\0" + struct.pack("<HQQ", 200, (1 << 64) - 1, (1 << 64) - 1)
    for at in range(8192 + 24, 8192 + 24 + 200 * 16, 16):
        data[at + 8 : at + 16] = struct.pack("<Q", 32768)
    data[32768:32776] = b"SNOD\1\0" + struct.pack("<H", 10_000)
    data[32776 : 32776 + 40 * 10_000] = struct.pack("<QQI20x", 1, 4096, 0) * 10_000
    return bytes(data)


@pytest.mark.parametrize("header", ["{[]: 1}", "{'shape': (1,), 'descr': [('a', [], {})]}"])
def test_an_array_with_an_impossible_header_is_judged(header: str) -> None:
    """Headers that Python cannot evaluate, or numbers that it cannot print, are a verdict."""
    assert judge_file(MemoryFile(b"a.npy", _npy(header))).state in ("TORN", "UNKNOWN")
    verdict = judge_file(MemoryFile(b"a.npy", _impossible_array()))
    assert (verdict.state, DEFECT in verdict.reason) == ("TORN", False)


def test_a_long_name_is_not_searched_for_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that names one long text millions of times is UNKNOWN within the budget of its file."""
    monkeypatch.setattr(model, "MAX_STEPS", 500_000)
    verdict = judge_file(MemoryFile(b"a.h5", _hdf5_of_one_long_name()))
    assert (verdict.state, verdict.reason) == (
        "UNKNOWN",
        "it has more structures than are followed for a verdict",
    )


def test_lines_of_a_pickle_are_found_by_pages() -> None:
    """A line is not read byte by byte, and ends where it ends, whatever page it begins on."""
    lines = [b"", b"a" * 10, b"b" * 70_000, b"", b"c" * 65_536, b"d" * 200_000]
    data = b"\x80\x02" + b"".join(b"c%s\n%s\n0" % (line, line) for line in lines) + b"N."
    stream = PickleStream(BoundedReader(MemoryFile(b"a.pkl", data).read, len(data)))
    taken = 0
    take = stream.take

    def counted(length: int) -> bytes:
        nonlocal taken
        taken += 1
        return take(length)

    stream.take = counted  # type: ignore[method-assign]
    found = [code.argument for code in stream.opcodes() if code.name == "GLOBAL"]
    assert found == [line + b"\n" + line for line in lines]
    assert stream.at == len(data)
    assert taken < 100
    assert judge_file(MemoryFile(b"a.pkl", b"\x80\x02c" + b"a" * (1 << 21))).state == "UNKNOWN"


def test_pieces_that_lie_over_each_other_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many holes in many pieces of one range are not compared each with each; pieces with and without a checksum can be sorted."""
    monkeypatch.setattr(verdict, "_MAX_STEPS", 10_000)
    data = (bytes(4096) + b"x" * 4096) * 200
    pieces = tuple(Piece(0, len(data), 0 if number % 2 else None) for number in range(200))
    assert judge_structure(MemoryFile(b"a", data), Structure("", "", pieces)).state == "UNKNOWN"
    apart = tuple(Piece(4096 + 8192 * number, 8192 + 8192 * number, number) for number in range(200))
    done = tuple(Piece(4096, 8192) for _ in range(20_000))
    assert judge_structure(MemoryFile(b"a", data), Structure("", "", apart)).is_good
    assert judge_structure(MemoryFile(b"a", data), Structure("", "", done)).state in ("GOOD", "UNKNOWN")


def test_a_reader_that_fails_spares_the_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in one reader makes its file, or its directory, UNKNOWN with the reason; the others are judged."""

    def failing(reader: BoundedReader) -> Structure:
        if reader.name == b"bad.npy":
            raise ZeroDivisionError
        return Structure("test", "fine", ())

    def failing_recogniser(directory: DirectorySource, names: list[bytes]) -> object:
        raise RecursionError

    monkeypatch.setattr(verdict, "_FORMATS", (failing,))
    directory = MemoryDirectory({b"bad.npy": b"x", b"good.npy": b"x"})
    found = {one.path: one.verdict for one in checkpoints_in(directory)}
    assert (found[b"/d/bad.npy"].state, found[b"/d/good.npy"].state) == ("UNKNOWN", "GOOD")
    assert "ZeroDivisionError" in found[b"/d/bad.npy"].reason
    monkeypatch.setattr(verdict, "RECOGNISERS", (failing_recogniser,))
    found = {one.path: one.verdict for one in checkpoints_in(directory)}
    assert (found[b"/d"].state, found[b"/d/good.npy"].state) == ("UNKNOWN", "GOOD")


def test_half_of_a_surrogate_pair_in_a_name_is_shown(tmp_path: Path) -> None:
    """A tensor whose name JSON allows and UTF-8 does not is looked at and compared like any other."""
    root = tmp_path / "root"
    root.mkdir()
    header = b'{"a\\ud800b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    with Repository.create(tmp_path / "repository") as repository:
        for value in (1.0, 2.0):
            data = struct.pack("<Q", len(header)) + header + struct.pack("<f", value)
            (root / "m.safetensors").write_bytes(data)
            take(repository, root)
    path = str(root / "m.safetensors")
    for words in (
        ["tensors", path],
        ["tensors", "--history", path],
        ["tensors", "--json", path],
        ["diff", "--tensors", "-p", path, "latest~1", "latest"],
    ):
        done = CliRunner().invoke(cli, ["--repo", str(tmp_path / "repository"), *words])
        assert (done.exit_code, "ud800" in done.output) == (0, True), done.output

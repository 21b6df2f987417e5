"""What the writers of several ranks tell each other, and tensors that are in pieces."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.errors import Damaged
from ciuic.training import parts, shards
from ciuic.training.layout import TensorInFile
from ciuic.training.messages import StoredFile, Together

HERE = Together("token", 0, 2)
OTHER = Together("token", 1, 2)
FILE = StoredFile("model/a.safetensors", 5, b"map", 0)


def test_what_a_rank_has_stored_is_heard_and_cleared(tmp_path: Path) -> None:
    """Once; nothing is left behind."""
    with parts.answer(str(tmp_path), OTHER) as answer:
        answer.stored([FILE])
    assert parts.collect(str(tmp_path), HERE) == [FILE]
    parts.clear(str(tmp_path), "token")
    assert os.listdir(tmp_path / "parts") == []


def test_a_rank_that_cannot_or_has_died_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with its reason, but for one that never began."""
    parts.refuse(str(tmp_path), OTHER, "no memory")
    with pytest.raises(OSError, match="rank 1: no memory"):
        parts.collect(str(tmp_path), HERE)
    died = multiprocessing.get_context("fork").Process(target=_die, args=(str(tmp_path),))
    died.start()
    died.join()
    with pytest.raises(OSError, match="the writer of rank 1 died"):
        parts.collect(str(tmp_path), HERE)
    with parts.answer(str(tmp_path), OTHER) as answer:
        answer.stored([FILE])
    monkeypatch.setattr(parts, "_BEGIN_SECONDS", 0.01)
    with pytest.raises(OSError, match="rank 2 has not handed over"):
        parts.collect(str(tmp_path), Together("token", 0, 3))


def test_a_writer_without_a_trainer_gives_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were killed with its own trainer will not hand over."""
    monkeypatch.setattr(parts, "_ORPHAN_BEGIN_SECONDS", 0.01)
    with pytest.raises(OSError, match="rank 1 has not handed over"):
        parts.collect(str(tmp_path), HERE, lambda: True)


def _die(repository: str) -> None:
    with parts.answer(repository, OTHER):
        os._exit(9)


def test_names_of_pieces_are_nobody_elses() -> None:
    """A whole tensor whose name looks like a piece's gets another one."""
    assert shards.parse_piece(shards.piece_name("a@b", (3, 0))) == ("a@b", (3, 0))
    assert shards.parse_piece(shards.piece_name("a", ())) == ("a", ())
    for name in ("a@0,1", "a@", "a\n@1"):
        assert shards.parse_piece(shards.plain_name(name)) is None
    assert shards.plain_name("a@b") == "a@b"


def test_any_block_is_read_of_a_tensor_in_pieces() -> None:
    """Cut along both dimensions, of a dtype that safetensors has no name for as well, or stored by two ranks; without one of the pieces it is
    damaged."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    from ciuic.training.pieces import InPieces, Piece

    for dtype in (torch.float32, torch.complex64):
        whole = torch.arange(35).view(5, 7).to(dtype)
        contents: dict[str, Any] = {}
        pieces = []
        for row, column in itertools.product((0, 2), (0, 3)):
            block = whole[row : (2, 5)[row > 0], column : (3, 7)[column > 0]].contiguous()
            stored = shards.as_storable(block)
            path = f"{row},{column}"
            contents[path] = stored.view(torch.uint8).reshape(-1)
            where = TensorInFile(
                "F32" if dtype == torch.float32 else "U8", tuple(stored.shape), 0, block.nbytes
            )
            pieces.append(Piece((row, column), path, where))
        source: Any = SimpleNamespace(
            read=lambda path, start, size, of=contents: of[path][start : start + size].clone()
        )
        said = {"shape": [5, 7], "dtype": str(dtype).removeprefix("torch.")}
        tensor = InPieces("a", said, [*pieces, pieces[0]], source)
        for top, left in itertools.product(range(5), range(7)):
            for rows, columns in itertools.product(range(6 - top), range(8 - left)):
                found = tensor.read((top, left), (rows, columns))
                assert found.equal(whole[top : top + rows, left : left + columns])
        with pytest.raises(Damaged, match="elements of 35"):
            InPieces("a", said, pieces[1:], source)

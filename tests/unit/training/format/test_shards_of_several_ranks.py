"""Messages between the writers of several ranks, and tensors in pieces."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from support.small_repository import BLOCK, make_snapshot

from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.training.format import shards
from ciuic.training.format.layout import TensorInFile
from ciuic.training.writer import rank_parts
from ciuic.training.writer.messages import JointSave, StoredFile

HERE = JointSave("token", 0, (0, 1))
OTHER = JointSave("token", 1, (0, 1))
FILE = StoredFile("model/a.safetensors", 5, b"map", 0)


def test_stored_files_of_a_rank_are_collected_once(tmp_path: Path) -> None:
    """The files that a rank has stored are collected once, and no message is left behind."""
    with rank_parts.report_part(str(tmp_path), OTHER) as answer:
        answer.stored([FILE])
    assert rank_parts.collect(str(tmp_path), HERE) == [FILE]
    rank_parts.clear(str(tmp_path), "token")
    assert os.listdir(tmp_path / "parts") == []


def test_a_rank_that_cannot_or_has_died_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails or dies is named with its reason at once; one that never began is waited for."""
    rank_parts.report_failure(str(tmp_path), OTHER, "no memory")
    with pytest.raises(OSError, match="rank 1: no memory"):
        rank_parts.collect(str(tmp_path), HERE)
    died = multiprocessing.get_context("fork").Process(target=_die, args=(str(tmp_path),))
    died.start()
    died.join()
    with pytest.raises(OSError, match="the writer of rank 1 died"):
        rank_parts.collect(str(tmp_path), HERE)
    with rank_parts.report_part(str(tmp_path), OTHER) as answer:
        answer.stored([FILE])
    monkeypatch.setattr(rank_parts, "_BEGIN_SECONDS", 0.01)
    with pytest.raises(OSError, match="rank 2 did not begin"):
        rank_parts.collect(str(tmp_path), JointSave("token", 0, (0, 1, 2)))


def test_a_writer_without_a_trainer_gives_up_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose own trainer has ended waits only seconds for other ranks to begin."""
    monkeypatch.setattr(rank_parts, "_ORPHAN_BEGIN_SECONDS", 0.01)
    with pytest.raises(OSError, match="rank 1 did not begin"):
        rank_parts.collect(str(tmp_path), HERE, lambda: True)


def _die(repository: str) -> None:
    with rank_parts.report_part(repository, OTHER):
        os._exit(9)


def test_a_tensor_named_like_a_piece_is_stored_under_another_name() -> None:
    """A whole tensor whose name looks like that of a piece is stored under another one."""
    assert shards.parse_piece(shards.piece_name("a@b", (3, 0))) == ("a@b", (3, 0))
    assert shards.parse_piece(shards.piece_name("a", ())) == ("a", ())
    for name in ("a@0,1", "a@", "a\n@1"):
        assert shards.parse_piece(shards.plain_name(name)) is None
    assert shards.plain_name("a@b") == "a@b"


def test_any_block_is_read_of_a_tensor_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut along both dimensions, of a dtype that safetensors has no name for as well, or stored by two ranks; without one of the pieces it is
    damaged."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    from ciuic.training.format.stored_files import PiecewiseTensor, RangeReader, SnapshotRef, StoredPiece

    for dtype in (torch.float32, torch.complex64):
        full = torch.arange(35).view(5, 7).to(dtype)
        contents: dict[str, Any] = {}
        stored_files = []
        for row, column in itertools.product((0, 2), (0, 3)):
            block = full[row : (2, 5)[row > 0], column : (3, 7)[column > 0]].contiguous()
            stored = shards.as_storable(block)
            path = f"{row},{column}"
            contents[path] = stored.view(torch.uint8).reshape(-1)
            where = TensorInFile(
                "F32" if dtype == torch.float32 else "U8", tuple(stored.shape), 0, block.nbytes
            )
            stored_files.append(StoredPiece((row, column), path, where))
        source = RangeReader(SnapshotRef("", ""))
        monkeypatch.setattr(
            source, "read", lambda path, start, size, of=contents: of[path][start : start + size].clone()
        )
        description = {"shape": [5, 7], "dtype": str(dtype).removeprefix("torch.")}
        tensor = PiecewiseTensor("a", description, [*stored_files, stored_files[0]], source)
        for top, left in itertools.product(range(5), range(7)):
            for rows, columns in itertools.product(range(6 - top), range(8 - left)):
                found = tensor.read((top, left), (rows, columns))
                assert found.equal(full[top : top + rows, left : left + columns])
        with pytest.raises(Damaged, match="elements of 35"):
            PiecewiseTensor("a", description, stored_files[1:], source)
        contents["count"] = torch.tensor([3.0]).view(torch.uint8)
        piece = StoredPiece((), "count", TensorInFile("F32", (), 0, 4))
        count = PiecewiseTensor("count", {"shape": [], "dtype": "float32"}, [piece], source)
        assert count.whole().equal(torch.tensor(3.0))


def test_a_block_of_small_tensors_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors beside one another in a block take one read of it; each is memory of its own."""
    pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    from ciuic.training.format import stored_files
    from ciuic.training.format.stored_files import SnapshotRef, read_file

    content = bytes(range(256)) * 16
    with (
        Repository.create(tmp_path / "repository", block_size=BLOCK) as repository,
        repository.writer() as writer,
    ):
        id_ = make_snapshot(writer, "cs-000001", {b"small": content[:BLOCK]}).id
    reads = []

    def counted(repository: Any, entry: Any, into: memoryview, first_block: int = 0) -> None:
        reads.append(first_block)
        read_file(repository, entry, into, first_block)

    monkeypatch.setattr(stored_files, "read_file", counted)
    source = stored_files.RangeReader(SnapshotRef(str(tmp_path / "repository"), id_))
    starts = range(0, 2000, 100)
    found = [source.read("small", start, 100) for start in starts]
    assert [bytes(one.numpy()) for one in found] == [content[start : start + 100] for start in starts]
    found[0][:] = 0
    assert bytes(source.read("small", 0, 100).numpy()) == content[:100]
    assert reads == [0]
    source.close()

"""Tests of the writer's threads for packing and writing, which a caller can tell only by the time."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from ciuic.repository import Repository, Writer
from ciuic.repository.compression import Content
from ciuic.repository.identity import Bytes
from ciuic.repository.writing.chunk_store import WriteBehind
from ciuic.system.disk import Disk

_BLOCK = 256 << 10
_MIB = 1 << 20


class _FullDisk(Disk):
    """Disk with room for some large writes, after which every write fails and is counted."""

    def __init__(self, large_writes: int) -> None:
        self.left = large_writes
        self.failed = 0
        self.threads: set[int] = set()

    def write_at(self, fd: int, parts: Iterable[Bytes], offset: int) -> int:
        parts = list(parts)
        if sum(map(len, parts)) > _MIB:
            self.threads.add(threading.get_ident())
            if self.left == 0:
                self.failed += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= 1
        return super().write_at(fd, parts, offset)


def _repository(path: Path, disk: Disk) -> Repository:
    Repository.create(path).close()
    repository = Repository.open(path)
    repository._disk = disk
    return repository


def _blocks(count: int) -> list[bytes]:
    """Return blocks of which some compress and take long, and some do not and take no time."""
    return [
        os.urandom(_BLOCK) if number % 3 else (b"%d step\n" % number * _BLOCK)[:_BLOCK]
        for number in range(count)
    ]


def _put_much(writer: Writer) -> None:
    for _ in range(20):
        writer.put_chunks([Content(os.urandom(_BLOCK)) for _ in range(16)])


@pytest.mark.parametrize("run", [1, 5, 16])
def test_chunks_lie_in_the_order_in_which_they_were_put(tmp_path: Path, run: int) -> None:
    """Chunks lie in the order in which they were put, whatever their size and packing time."""
    blocks = [*_blocks(40), b"small", *_blocks(20), b"another"]
    ids = []
    with Repository.create(tmp_path / "repository") as repository, repository.writer() as writer:
        for start in range(0, len(blocks), run):
            ids += writer.put_chunks([Content(memoryview(block)) for block in blocks[start : start + run]])
        for id_, block in zip(ids, blocks, strict=True):
            assert writer.chunks.get(id_) == block, "wherever it is at the moment"
        writer.flush()
        records = [record for pack in repository.packs() for record in repository.pack_records(pack.number)]
    assert [record.id for record in records] == list(dict.fromkeys(ids))


def test_content_is_taken_before_the_call_returns(tmp_path: Path) -> None:
    """A buffer may be reused once the call has returned."""
    with Repository.create(tmp_path / "repository") as repository, repository.writer() as writer:
        ids, buffer = [], bytearray(2 * _BLOCK)
        for number in range(12):
            buffer[:] = bytes([number + 1]) * len(buffer)
            view = memoryview(buffer)
            ids += writer.put_chunks([Content(view[:_BLOCK])])
            view.release()
        writer.flush()
        for number, id_ in enumerate(ids):
            assert writer.chunks.get(id_) == bytes([number + 1]) * _BLOCK


def test_a_failed_background_write_fails_all_later_calls(
    tmp_path: Path,
) -> None:
    """A write that fails in a thread fails a later call, the sync at the latest, and every one after it.

    Nothing is written after it, and what was durable before is sound.
    """
    disk = _FullDisk(2)
    with _repository(tmp_path / "repository", disk) as repository:
        with repository.writer() as writer:
            with pytest.raises(OSError, match="No space"):
                _put_much(writer)
            for _ in range(2):
                with pytest.raises(OSError, match="No space"):
                    writer.flush()
        assert disk.failed == 1
        assert threading.get_ident() not in disk.threads
        with repository.writer() as writer:
            pass
        assert list(repository.scrub()) == []


def test_jobs_are_done_in_turn_and_none_after_one_that_failed() -> None:
    """Jobs run in turn, none after one that failed; their results are delivered in the caller's thread."""
    queue = WriteBehind()
    done: list[int] = []
    finished: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        if number == 3:
            raise OSError(errno.EIO, "3")
        return number

    def submit_all() -> None:
        for number in range(8):
            queue.submit(partial(job, number), finished.append, worth_a_thread=True)
        queue.settle(wait=True)

    with pytest.raises(OSError, match="3"):
        submit_all()
    assert done == [0, 1, 2, 3]
    assert finished == [0, 1, 2]
    queue.close()

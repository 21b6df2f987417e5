"""Tests of recoded chunks: the same content comes back, chains stay short, and the packs shrink."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_states import BLOCK, chunks_of, content_of, drifting, recode, save_state

from ciuic.errors import Busy
from ciuic.maintenance.check import check
from ciuic.maintenance.prune import CollectionRefused, forget, prune
from ciuic.maintenance.sweep import Thresholds
from ciuic.repository import Repository
from ciuic.repository import pack_format as pf
from ciuic.repository.compression import MAX_WRITTEN_BASE_DEPTH, Codec, Pace
from ciuic.repository.index_database import INDEX_NAME
from ciuic.repository.locks import Claim
from ciuic.types import SnapshotId

BLOCKS = 4
EAGER = Thresholds(unused_share=0.0, pack_dead_share=0.0)
DIFFERENCE = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=BLOCK) as made:
        yield made


def depths(repository: Repository, id_: SnapshotId) -> set[int]:
    return {len(repository.chunks.locate_all(chunk)) - 1 for chunk in chunks_of(repository, id_)}


def test_only_the_newest_of_a_sequence_lies_as_it_is(repository: Repository) -> None:
    """Each state but the newest becomes a difference from the next; every fifth has no base."""
    states = list(drifting(12, BLOCK * BLOCKS))
    ids = [save_state(repository, states[0], 0)]
    for number, state in enumerate(states[1:], start=1):
        ids.append(save_state(repository, state, number))
        assert recode(repository, ids[-2], ids[-1]) == BLOCKS
    assert [content_of(repository, id_) for id_ in ids] == states
    assert [max(depths(repository, id_)) for id_ in ids] == [4, 3, 2, 1, 0] * 2 + [1, 0]
    newest = [repository.chunks.locate(chunk) for chunk in chunks_of(repository, ids[-1])]
    assert {place.flags for place in newest} == {0}
    assert repository.stored_bytes() < 0.85 * sum(map(len, states))
    assert not check(repository, read_data=True).damaged
    assert repository.check_index() == []


def test_a_base_outlives_its_snapshot(repository: Repository) -> None:
    """The newest snapshot may go: what rests on it stays readable through any number of sweeps."""
    states = list(drifting(3, BLOCK * BLOCKS))
    ids = [save_state(repository, state, number) for number, state in enumerate(states)]
    recode(repository, ids[0], ids[1])
    recode(repository, ids[1], ids[2])
    forget(repository, ids[1:])
    for _ in range(2):
        prune(repository, None, thresholds=EAGER)
        assert content_of(repository, ids[0]) == states[0]
    assert not check(repository, read_data=True).damaged


def test_nothing_becomes_its_own_base(repository: Repository) -> None:
    """Of two states that are to rest on each other only one does."""
    states = list(drifting(2, BLOCK * BLOCKS))
    one, other = (save_state(repository, state, number) for number, state in enumerate(states))
    assert recode(repository, one, other) == BLOCKS
    assert recode(repository, other, one) == BLOCKS
    assert (depths(repository, one), depths(repository, other)) == ({1}, {0})
    assert [content_of(repository, one), content_of(repository, other)] == states


def test_noise_and_mixed_packs_stay_as_they_are(repository: Repository) -> None:
    """What does not become smaller is left alone, and so is a pack that has more of something else."""
    drawn = random.Random(1)
    noise = [save_state(repository, drawn.randbytes(BLOCK * BLOCKS), number) for number in range(2)]
    size = repository.stored_bytes()
    assert recode(repository, *noise, kind="best") == 0
    states = list(drifting(2, BLOCK * BLOCKS))
    one, other = (save_state(repository, state, number) for number, state in enumerate(states, start=2))
    first, base = chunks_of(repository, one)[0], chunks_of(repository, other)[0]
    with repository.writer() as writer:
        assert writer.recode({first: Codec("difference", 4, base)}).chunks == 0
    assert repository.stored_bytes() > size
    assert {place.flags for place in map(repository.chunks.locate, chunks_of(repository, one))} == {0}


def test_the_pace_ends_the_work(repository: Repository) -> None:
    """Work that is ended changes nothing in the pack it was at, and can be done again."""
    states = list(drifting(2, BLOCK * BLOCKS))
    one, other = (save_state(repository, state, number) for number, state in enumerate(states))
    size = repository.stored_bytes()
    wanted = {
        chunk: Codec("difference", 4, base)
        for chunk, base in zip(chunks_of(repository, one), chunks_of(repository, other), strict=True)
    }
    paces: list[Pace] = ["patient", "soon", "now"]
    with repository.writer() as writer:
        done = writer.recode(wanted, lambda: paces.pop(0) if len(paces) > 1 else "now")
    assert (done.stopped, done.chunks) == (True, 0)
    assert repository.stored_bytes() == size
    assert recode(repository, one, other) == BLOCKS


def test_no_pack_goes_while_another_process_copies(repository: Repository) -> None:
    """A claim on the repository keeps every pack."""
    states = list(drifting(2, BLOCK * BLOCKS))
    one, other = (save_state(repository, state, number) for number, state in enumerate(states))
    claim = Claim.acquire(str(repository.path))
    try:
        with pytest.raises(Busy):
            recode(repository, one, other)
    finally:
        claim.release()
    assert recode(repository, one, other) == BLOCKS


def test_a_reader_that_is_open_goes_on(repository: Repository) -> None:
    """A reader that has found the old copies finds the new ones."""
    states = list(drifting(2, BLOCK * BLOCKS))
    one, other = (save_state(repository, state, number) for number, state in enumerate(states))
    with Repository.open(repository.path) as reader:
        assert content_of(reader, one) == states[0]
        recode(repository, one, other)
        assert content_of(reader, one) == states[0]
        buffers = [bytearray(BLOCK) for _ in range(BLOCKS)]
        left = reader.into_memory.read(chunks_of(reader, one), [memoryview(buffer) for buffer in buffers])
        for number in left:
            buffers[number][:] = reader.chunks.get(chunks_of(reader, one)[number])
        assert b"".join(buffers) == states[0]


EIGHT = list(drifting(8, BLOCK * 2))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 7)),
        st.tuples(st.just("recode"), st.tuples(st.integers(0, 9), st.integers(0, 9))),
        st.tuples(st.just("forget"), st.integers(0, 9)),
        st.tuples(st.just("prune"), st.booleans()),
        st.tuples(st.just("lose the index"), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(history=steps)
def test_any_history_reads_back(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, object]]
) -> None:
    """Snapshots read back as a dictionary has them, whatever was saved, recoded, removed and swept.

    Any state may become a difference from any other. No chain is longer than writers may make it.
    """
    path = tmp_path_factory.mktemp("recode") / "r"
    model: dict[SnapshotId, bytes] = {}
    with Repository.create(path, block_size=BLOCK) as repository:
        for number, (what, which) in enumerate(history):
            ids = sorted(model)
            if what == "save" and isinstance(which, int):
                # Blocks of several states, so that snapshots share some.
                mixed = EIGHT[which][:BLOCK] + EIGHT[(which + number) % 8][BLOCK:]
                model[save_state(repository, mixed, number)] = mixed
            elif what == "recode" and isinstance(which, tuple) and ids:
                recode(repository, ids[which[0] % len(ids)], ids[which[1] % len(ids)], kind="best")
            elif what == "forget" and isinstance(which, int) and ids:
                forget(repository, [ids[which % len(ids)]])
                del model[ids[which % len(ids)]]
            elif what == "prune":
                # Packs without a snapshot stay where the index, which says that none is missing, was lost.
                with suppress(CollectionRefused) if not model else nullcontext():
                    prune(repository, None, thresholds=EAGER if which else Thresholds())
            elif what == "lose the index":
                # The index is a cache: what it told must not be needed.
                for cache in path.glob(f"{INDEX_NAME}*"):
                    cache.unlink()
        for id_, expected in model.items():
            assert content_of(repository, id_) == expected
            assert max(depths(repository, id_), default=0) <= MAX_WRITTEN_BASE_DEPTH
        if model:
            assert not check(repository, read_data=True).damaged
    shutil.rmtree(path)

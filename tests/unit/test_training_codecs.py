"""Which codec a state is stored with: what helps on samples, within the time there is; and whatever it is, the same content comes back."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ciuic.repository import Repository, Walker
from ciuic.repository import packformat as pf
from ciuic.repository.coding import MOST_BASES
from ciuic.training import codecs
from ciuic.training.codecs import Chooser
from ciuic.training.committing import Known, commit, manifest_of
from ciuic.training.messages import File, Rules
from ciuic.training.preservation import EverySteps, Keep, Latest
from ciuic.training.processors import Idleness
from ciuic.types import ChunkId, Snapshot

_BLOCK = 65536
_SIZE = 2 * _BLOCK + 1000
DIFFERENCE = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE


class Processors(Idleness):
    """As many of them idle as is said."""

    def __init__(self, idle: float | None = 1.0) -> None:
        super().__init__()
        self.idle = idle

    def share(self) -> float | None:
        return self.idle


class Saves:
    """Successive commits of one state, as the writer process makes them."""

    def __init__(
        self, repository: Repository, compression: str = "small", keep: tuple[Keep, ...] = ()
    ) -> None:
        self.repository = repository
        self.processors = Processors()
        self.chooser = Chooser(compression, Rules(keep=keep), self.processors)
        self.known = Known()

    def save(
        self,
        content: bytes,
        *,
        width: int = 4,
        in_a_hurry: Callable[[], bool] = lambda: False,
        awaited: Callable[[], bool] = lambda: False,
    ) -> Snapshot:
        manifest = manifest_of([File("model/weight.safetensors", 0, len(content), width)])
        with self.repository.writer() as writer:
            chosen = self.chooser.begin(writer, in_a_hurry=in_a_hurry, awaited=awaited)
            view = memoryview(content)
            snapshot = commit(self.repository, writer, view, manifest, b"/training", self.known, chosen)
            self.chooser.done(chosen)
        self.repository.close()
        return snapshot

    def chunks(self, snapshot: Snapshot) -> list[ChunkId]:
        """Of the file, in order."""
        return [reached.id for reached in Walker(self.repository).walk(snapshot) if reached.kind == "data"]

    def flags(self, snapshot: Snapshot) -> set[int]:
        return {self.repository.chunks.locate(chunk).flags for chunk in self.chunks(snapshot)}

    def content(self, snapshot: Snapshot) -> bytes:
        return b"".join(map(self.repository.chunks.get, self.chunks(snapshot)))


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=_BLOCK) as made:
        yield made


def weights(count: int, drift: float = 1e-4) -> Iterator[bytes]:
    """States of a training: numbers that move a little from each to the next."""
    drawn = random.Random(2)
    values = [drawn.gauss(0, 0.02) for _ in range(_SIZE // 4)]
    for _ in range(count):
        yield struct.pack(f"<{len(values)}f", *values)
        values = [value * (1 + drawn.gauss(0, drift)) for value in values]


def test_twenty_saves_come_back_and_take_little(repository: Repository) -> None:
    """The first as planes, the next as differences, each from a base that is near, never behind too many, anew from every 16th."""
    saves = Saves(repository)
    states = list(weights(19))
    made = [saves.save(state) for state in states]
    assert [saves.content(snapshot) for snapshot in made] == states
    assert [saves.flags(snapshot) == {DIFFERENCE} for snapshot in made] == [at % 16 != 0 for at in range(19)]
    depths = [len(repository.chunks.locate_all(saves.chunks(snapshot)[0])) - 1 for snapshot in made]
    assert depths == [0, *(1, 2, 3) * 5, 0, 1, 2]
    assert max(depths) < MOST_BASES
    assert repository.stored_bytes() < 0.75 * sum(map(len, states))
    assert list(repository.scrub()) == []


def test_what_did_not_change_costs_nothing(repository: Repository) -> None:
    """Not even a try of codecs: the chunks are there."""
    saves = Saves(repository)
    state = next(weights(1))
    first = saves.save(state)
    size = repository.stored_bytes()
    second = saves.save(state)
    assert saves.chunks(second) == saves.chunks(first)
    assert repository.stored_bytes() - size < 2 * 4096, "the snapshot's own tree, in a segment"


def test_few_snapshots_that_stay_have_no_bases_that_outlive_theirs(repository: Repository) -> None:
    """Differences are used until the first has to go: after that a base takes more than they save, where few are kept."""
    saves = Saves(repository, keep=(Latest(3),))
    made = [saves.flags(saves.save(state)) for state in weights(5)]
    assert made == [{pf.FLAG_PLANES}, {DIFFERENCE}, {DIFFERENCE}, {pf.FLAG_PLANES}, {pf.FLAG_PLANES}]


def test_whoever_adds_to_those_that_stay_keeps_bases_as_well(repository: Repository) -> None:
    """Single ones of many snapshots are kept by such rules: there is no difference from one that goes."""
    saves = Saves(repository, keep=(Latest(100), EverySteps(1000)))
    assert [saves.flags(saves.save(state)) for state in weights(2)] == [{pf.FLAG_PLANES}] * 2


def test_states_that_have_nothing_in_common_are_no_bases(repository: Repository) -> None:
    """Planes alone are smaller then, and are chosen."""
    saves = Saves(repository)
    drawn = random.Random(3)
    first, second = (struct.pack("<32768f", *(drawn.gauss(0, 1) for _ in range(32768))) for _ in range(2))
    assert saves.flags(saves.save(first)) == {pf.FLAG_PLANES}
    assert saves.flags(saves.save(second)) == {pf.FLAG_PLANES}


def test_noise_is_stored_as_it_is(repository: Repository) -> None:
    """What the samples do not make smaller is not tried as a whole; the repository has the format that every ciuic reads."""
    saves = Saves(repository, "auto")
    assert saves.flags(saves.save(random.Random(1).randbytes(_SIZE))) == {0}
    assert Repository.open(repository.path).config.format == 1


def test_none_means_none(repository: Repository) -> None:
    """Not even what would become a tenth."""
    saves = Saves(repository, "none")
    assert saves.flags(saves.save(b"words " * 20000)) == {0}


def test_without_a_width_the_repository_chooses(repository: Repository) -> None:
    """Text is compressed as ever."""
    saves = Saves(repository)
    assert saves.flags(saves.save(b"words " * 20000, width=0)) == {pf.FLAG_ZSTD}


@pytest.mark.parametrize("why", ["the next save is waiting", "it has waited for long"])
def test_codecs_are_given_up_where_time_is_short(
    repository: Repository, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content is stored all the same, and the next save may have codecs again."""
    saves = Saves(repository, "auto")
    first, second = weights(2)
    with monkeypatch.context() as patched:
        if why == "it has waited for long":
            patched.setattr(codecs, "_PATIENCE_SECONDS", -1.0)
        made = saves.save(first, in_a_hurry=lambda: why == "the next save is waiting")
    assert saves.flags(made) == {0}
    assert saves.content(made) == first
    assert pf.FLAG_PLANES & min(saves.flags(saves.save(second)))


@pytest.mark.parametrize("is_awaited", [False, True])
def test_codecs_run_when_nobody_else_wants_the_processor(repository: Repository, is_awaited: bool) -> None:
    """In the class of threads that get what is left; as all others where the training stands still for the snapshot."""
    classes: set[int] = set()
    saves = Saves(repository, "auto")
    states = weights(2)
    saves.save(next(states))

    def awaited() -> bool:
        classes.update(os.sched_getscheduler(int(id_)) for id_ in os.listdir("/proc/self/task"))
        return is_awaited

    made = saves.save(next(states), awaited=awaited)
    assert saves.flags(made) == {DIFFERENCE}
    assert (os.SCHED_IDLE in classes) is not is_awaited
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_small_takes_the_time_it_needs(repository: Repository) -> None:
    """Also when the next save is waiting."""
    saves = Saves(repository, "small")
    assert saves.flags(saves.save(next(weights(1)), in_a_hurry=lambda: True)) == {pf.FLAG_PLANES}


def test_numbers_of_two_and_eight_bytes_have_planes_too(repository: Repository) -> None:
    """Half and double precision."""
    saves = Saves(repository)
    drawn = random.Random(5)
    for width, code in ((2, "e"), (8, "d")):
        state = struct.pack(f"<9000{code}", *(drawn.gauss(0, 0.02) for _ in range(9000)))
        made = saves.save(state, width=width)
        assert saves.flags(made) == {pf.FLAG_PLANES}
        assert saves.content(made) == state


@pytest.mark.parametrize(
    ("idle", "is_awaited", "is_coded"),
    [(0.05, False, False), (0.05, True, True), (0.5, False, True), (None, False, True)],
)
def test_a_training_that_keeps_all_processors_busy_is_spared_codecs(
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
    idle: float | None,
    is_awaited: bool,
    is_coded: bool,
) -> None:
    """But for a moment in which it may say that it waits for the snapshot; then they are its own gain."""
    monkeypatch.setattr(codecs, "_WORD_SECONDS", 0.0)
    saves = Saves(repository, "auto")
    saves.processors.idle = idle
    made = saves.save(next(weights(1)), awaited=lambda: is_awaited)
    assert saves.flags(made) == ({pf.FLAG_PLANES} if is_coded else {0})


def test_idle_time_is_what_the_kernel_counts_for_the_processors_one_may_use(tmp_path: Path) -> None:
    """Idle and waiting for a disk, of all eight kinds; other processors and short times tell nothing."""
    stat = tmp_path / "stat"
    mine = min(os.sched_getaffinity(0))

    def write(*ticks: int) -> None:
        stat.write_text(
            f"cpu  1 2 3 4 5 6 7 8 9 10\ncpu{mine} {' '.join(map(str, ticks))} 0 0\ncpu99999 0 0 0 {ticks[0]} 0 0 0 0\nintr 5\n"
        )

    write(100, 0, 0, 0, 0, 0, 0, 0)
    idleness = Idleness(str(stat))
    write(120, 0, 0, 10, 0, 0, 0, 0)
    assert idleness.share() is None
    write(150, 10, 10, 20, 10, 0, 0, 0)
    assert idleness.share() == 0.3
    idleness.begin()
    write(250, 10, 10, 20, 10, 0, 0, 0)
    assert idleness.share() == 0.0
    assert Idleness(str(tmp_path / "nothing")).share() is None

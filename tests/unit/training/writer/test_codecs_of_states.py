"""Codecs of a state: the best by samples within the time there is, with the same content back."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ciuic.repository import Repository, Walker
from ciuic.repository import pack_format as pf
from ciuic.repository.compression import MAX_WRITTEN_BASE_DEPTH
from ciuic.training.free_resources import CpuIdle
from ciuic.training.rules import EverySteps, Keep, Latest
from ciuic.training.writer import codecs
from ciuic.training.writer.codecs import CodecChooser
from ciuic.training.writer.messages import Manifest, ManifestFile, RetentionRules
from ciuic.training.writer_process import LastCommit, commit
from ciuic.types import ChunkId, Snapshot

_BLOCK = 65536
_SIZE = 2 * _BLOCK + 1000
DIFFERENCE = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE


class Processors(CpuIdle):
    """Processors whose idle share the test sets."""

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
        self.chooser = CodecChooser(compression, RetentionRules(keep=keep), self.processors)
        self.known = LastCommit()

    def save(
        self,
        content: bytes,
        *,
        width: int = 4,
        in_a_hurry: Callable[[], bool] = lambda: False,
        awaited: Callable[[], bool] = lambda: False,
    ) -> Snapshot:
        manifest = Manifest(
            time_ns=1,
            message="",
            tags=(),
            files=[ManifestFile("model/weight.safetensors", 0, len(content), width)],
        )
        with self.repository.writer() as writer:
            chosen = self.chooser.begin(writer, in_a_hurry=in_a_hurry, awaited=awaited)
            view = memoryview(content)
            snapshot = commit(self.repository, writer, view, manifest, b"/training", self.known, chosen)
            self.chooser.done(chosen)
        self.repository.close()
        return snapshot

    def chunks(self, snapshot: Snapshot) -> list[ChunkId]:
        """Return the chunks of a file, in order."""
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
    """Return states of a training: numbers that change a little from one state to the next."""
    drawn = random.Random(2)
    values = [drawn.gauss(0, 0.02) for _ in range(_SIZE // 4)]
    for _ in range(count):
        yield struct.pack(f"<{len(values)}f", *values)
        values = [value * (1 + drawn.gauss(0, drift)) for value in values]


def test_twenty_saves_come_back_and_take_little(repository: Repository) -> None:
    """The first save is stored as planes, later ones as differences with short chains of bases."""
    saves = Saves(repository)
    states = list(weights(19))
    made = [saves.save(state) for state in states]
    assert [saves.content(snapshot) for snapshot in made] == states
    assert [saves.flags(snapshot) == {DIFFERENCE} for snapshot in made] == [at % 16 != 0 for at in range(19)]
    depths = [len(repository.chunks.locate_all(saves.chunks(snapshot)[0])) - 1 for snapshot in made]
    assert depths == [0, *(1, 2, 3) * 5, 0, 1, 2]
    assert max(depths) < MAX_WRITTEN_BASE_DEPTH
    assert repository.stored_bytes() < 0.75 * sum(map(len, states))
    assert list(repository.scrub()) == []


def test_unchanged_content_is_found_before_any_codec(repository: Repository) -> None:
    """Unchanged content is found in the repository before any codec is tried."""
    saves = Saves(repository)
    state = next(weights(1))
    first = saves.save(state)
    size = repository.stored_bytes()
    second = saves.save(state)
    assert saves.chunks(second) == saves.chunks(first)
    assert repository.stored_bytes() - size < 2 * 4096, "the snapshot's own tree, in a segment"


def test_few_snapshots_that_stay_have_no_bases_that_outlive_theirs(repository: Repository) -> None:
    """Where few snapshots stay, differences are used only until the first has to go."""
    saves = Saves(repository, keep=(Latest(3),))
    made = [saves.flags(saves.save(state)) for state in weights(5)]
    assert made == [{pf.FLAG_PLANES}, {DIFFERENCE}, {DIFFERENCE}, {pf.FLAG_PLANES}, {pf.FLAG_PLANES}]


def test_rules_that_keep_single_snapshots_rule_out_differences(repository: Repository) -> None:
    """Rules that keep single snapshots of many rule out differences, whose bases would outlive theirs."""
    saves = Saves(repository, keep=(Latest(100), EverySteps(1000)))
    assert [saves.flags(saves.save(state)) for state in weights(2)] == [{pf.FLAG_PLANES}] * 2


def test_states_that_have_nothing_in_common_are_no_bases(repository: Repository) -> None:
    """Planes are chosen where they are smaller than a difference."""
    saves = Saves(repository)
    drawn = random.Random(3)
    first, second = (struct.pack("<32768f", *(drawn.gauss(0, 1) for _ in range(32768))) for _ in range(2))
    assert saves.flags(saves.save(first)) == {pf.FLAG_PLANES}
    assert saves.flags(saves.save(second)) == {pf.FLAG_PLANES}


def test_noise_is_stored_as_it_is(repository: Repository) -> None:
    """Content that samples do not make smaller is stored as it is, in the format that every ciuic reads."""
    saves = Saves(repository, "auto")
    assert saves.flags(saves.save(random.Random(1).randbytes(_SIZE))) == {0}
    assert Repository.open(repository.path).config.format == 1


def test_compression_none_stores_content_as_it_is(repository: Repository) -> None:
    """compression="none" stores even compressible content as it is."""
    saves = Saves(repository, "none")
    assert saves.flags(saves.save(b"words " * 20000)) == {0}


def test_without_a_width_the_repository_chooses(repository: Repository) -> None:
    """A file without a known width, such as text, is compressed as the repository chooses."""
    saves = Saves(repository)
    assert saves.flags(saves.save(b"words " * 20000, width=0)) == {pf.FLAG_ZSTD}


@pytest.mark.parametrize("why", ["the next save is waiting", "it has waited for long"])
def test_codecs_are_given_up_where_time_is_short(
    repository: Repository, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content is stored uncoded when the time is over, and the next save may use codecs again."""
    saves = Saves(repository, "auto")
    first, second = weights(2)
    with monkeypatch.context() as patched:
        if why == "it has waited for long":
            patched.setattr(codecs, "_MAX_WAIT_SECONDS", -1.0)
        made = saves.save(first, in_a_hurry=lambda: why == "the next save is waiting")
    assert saves.flags(made) == {0}
    assert saves.content(made) == first
    assert pf.FLAG_PLANES & min(saves.flags(saves.save(second)))


@pytest.mark.parametrize("is_awaited", [False, True])
def test_codecs_run_on_idle_threads_unless_awaited(repository: Repository, is_awaited: bool) -> None:
    """Codecs run on SCHED_IDLE threads, and on ordinary ones while the training waits for the snapshot."""
    classes: set[int] = set()
    saves = Saves(repository, "auto")
    states = weights(2)
    saves.save(next(states))
    # The kernel may list a thread for a moment after Python has joined it.
    earlier = set(os.listdir("/proc/self/task"))

    def awaited() -> bool:
        for id_ in set(os.listdir("/proc/self/task")) - earlier:
            with suppress(ProcessLookupError):
                classes.add(os.sched_getscheduler(int(id_)))
        return is_awaited

    made = saves.save(next(states), awaited=awaited)
    assert saves.flags(made) == {DIFFERENCE}
    assert (os.SCHED_IDLE in classes) is not is_awaited
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_small_takes_the_time_it_needs(repository: Repository) -> None:
    """compression="small" codes everything even while the next save waits."""
    saves = Saves(repository, "small")
    assert saves.flags(saves.save(next(weights(1)), in_a_hurry=lambda: True)) == {pf.FLAG_PLANES}


def test_numbers_of_two_and_eight_bytes_have_planes_too(repository: Repository) -> None:
    """Half and double precision are stored as planes too."""
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
    """Without idle processors codecs run only if the training says at once that it waits."""
    monkeypatch.setattr(codecs, "_AWAITED_GRACE_SECONDS", 0.0)
    saves = Saves(repository, "auto")
    saves.processors.idle = idle
    made = saves.save(next(weights(1)), awaited=lambda: is_awaited)
    assert saves.flags(made) == ({pf.FLAG_PLANES} if is_coded else {0})


def test_idle_time_counts_only_allowed_processors(tmp_path: Path) -> None:
    """Idle and I/O wait of the allowed processors count; others, and short intervals, give no figure."""
    stat = tmp_path / "stat"
    mine = min(os.sched_getaffinity(0))

    def write(*ticks: int) -> None:
        stat.write_text(
            f"cpu  1 2 3 4 5 6 7 8 9 10\ncpu{mine} {' '.join(map(str, ticks))} 0 0\ncpu99999 0 0 0 {ticks[0]} 0 0 0 0\nintr 5\n"
        )

    write(100, 0, 0, 0, 0, 0, 0, 0)
    idleness = CpuIdle(str(stat))
    write(120, 0, 0, 10, 0, 0, 0, 0)
    assert idleness.share() is None
    write(150, 10, 10, 20, 10, 0, 0, 0)
    assert idleness.share() == 0.3
    idleness.begin()
    write(250, 10, 10, 20, 10, 0, 0, 0)
    assert idleness.share() == 0.0
    assert CpuIdle(str(tmp_path / "nothing")).share() is None

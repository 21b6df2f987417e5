"""Which files are kept from passing the worker by: names, what is learned, and what is left of it after a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.capture_bench import Bench, bench

from ciuic.fuse_layer import open_rules, unseen
from ciuic.fuse_layer.core import ROOT_ID, Caller
from ciuic.fuse_layer.open_rules import OpenRules, Wish

READ, WRITE, BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR


@pytest.fixture
def state_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def of_size(path: Path, size: int = 0, age_seconds: float = 0) -> Callable[[], os.stat_result]:
    path.touch()
    os.truncate(path, size)
    os.utime(path, (time.time() - age_seconds,) * 2)
    return lambda: os.stat(path)


@pytest.mark.parametrize(
    ("name", "wish"),
    [
        (b"MANIFEST-000005", Wish.TRACKED),
        (b"000004.log", Wish.TRACKED),
        (b"events.out.tfevents.1700000000.host", Wish.TRACKED),
        (b"metrics.jsonl", Wish.TRACKED),
        (b"checkpoint.pt", Wish.ANY),
        (b"model.safetensors", Wish.ANY),
        (b"000012.sst", Wish.ANY),
        (b"\xff.log", Wish.TRACKED),
        (b"a.log\n", Wish.ANY),
        (b"data.mdb", Wish.CACHED),
    ],
)
def test_names_of_new_files(name: bytes, wish: Wish, tmp_path: Path) -> None:
    """Logs are tracked, databases cached, checkpoints pass by; read-write and existing files are not tracked by name."""
    rules, attributes = OpenRules(), of_size(tmp_path / "file")
    assert rules.wish(name, 1, WRITE, attributes, fresh=True) is wish
    if wish is Wish.TRACKED:
        assert rules.wish(name, 1, BOTH, attributes, fresh=True) is Wish.ANY
        assert rules.wish(name, 1, READ, attributes, fresh=False) is Wish.ANY


def test_a_data_set_keeps_the_speed_of_the_disk(tmp_path: Path) -> None:
    """A large database that nobody has written lately passes by; a small one and one written lately do not."""
    rules = OpenRules()
    for size, age_seconds, wish in (
        (open_rules.MAX_CACHED_BYTES, 10**6, Wish.CACHED),
        (open_rules.MAX_CACHED_BYTES + 1, 10**6, Wish.ANY),
        (open_rules.MAX_CACHED_BYTES + 1, 60, Wish.CACHED),
    ):
        attributes = of_size(tmp_path / "data.mdb", size, age_seconds)
        assert rules.wish(b"data.mdb", 1, READ, attributes, fresh=False) is wish


def test_other_names_and_none(tmp_path: Path) -> None:
    """A list of the configuration takes the place of the default; an empty one switches the rule off."""
    attributes = of_size(tmp_path / "file")
    for rules, name, wish in (
        (OpenRules(["*.trace"], []), b"a.trace", Wish.TRACKED),
        (OpenRules(["*.trace"], []), b"a.log", Wish.ANY),
        (OpenRules([], []), b"a.mdb", Wish.ANY),
        (OpenRules([], ["[ab].bin"]), b"a.bin", Wish.CACHED),
    ):
        assert rules.wish(name, 1, WRITE, attributes, fresh=True) is wish


def test_what_is_learned_outlives_the_worker(tmp_path: Path, state_fd: int) -> None:
    """Names with another number, and inodes; of each the newest."""
    rules = OpenRules()
    for number in range(open_rules.MAX_LEARNED_INODES + 1):
        rules.note_joined(number)
    rules.note_stayed(b"shard-0001.rec")
    rules.save(state_fd)
    later, attributes = OpenRules(), of_size(tmp_path / "file")
    later.load(state_fd)
    for known in (rules, later):
        assert known.wish(b"shard-0739.rec", 10**9, WRITE, attributes, fresh=True) is Wish.TRACKED
        assert known.wish(b"other", 1, READ, attributes, fresh=False) is Wish.CACHED
        assert known.wish(b"other", 0, READ, attributes, fresh=False) is Wish.ANY


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x92\x01\x02", b"\x93\xff" * 50])
def test_a_file_that_means_nothing_is_none(tmp_path: Path, state_fd: int, content: bytes) -> None:
    """Whatever the owner of the root, or a disk, has made of it."""
    (tmp_path / "opens").write_bytes(content)
    rules = OpenRules()
    rules.load(state_fd)
    assert rules.wish(b"x", 1, WRITE, of_size(tmp_path / "x"), fresh=True) is Wish.ANY
    (tmp_path / "opens").unlink()
    os.mkfifo(tmp_path / "opens")
    rules.load(state_fd)  # returns


def test_a_state_directory_that_cannot_be_written(tmp_path: Path, state_fd: int) -> None:
    """Costs what was learned, and nothing else."""
    (tmp_path / "opens").mkdir()
    rules = OpenRules()
    rules.note_joined(5)
    rules.save(state_fd)
    assert rules.wish(b"x", 5, READ, of_size(tmp_path / "x"), fresh=False) is Wish.CACHED


@pytest.fixture
def here() -> Iterator[Bench]:
    with bench() as made:
        yield made


def test_a_name_that_stays_open_over_cuts_is_learned(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open at two cuts and for a minute: no checkpoint. The next of the kind is tracked, also by the next worker."""
    now = 1000.0
    monkeypatch.setattr(unseen.time, "monotonic", lambda: now)
    attr, handle = here.core.create(ROOT_ID, b"part-1", 0o644, os.O_WRONLY, Caller(0, 0))
    here.core.is_unseen(handle)
    wishes = []
    for seconds in (0.0, 30.0, 31.0):
        now += seconds
        here.core.committed(here.core.cut().epoch)
        wishes.append(here.core.wish(attr.node, os.O_WRONLY, fresh=True))
    assert wishes == [Wish.ANY, Wish.ANY, Wish.TRACKED]
    here.core.release(handle)
    here.start_again("6" * 32)
    node = here.core.lookup(ROOT_ID, b"part-1").node
    assert here.core.wish(node, os.O_WRONLY, fresh=True) is Wish.TRACKED

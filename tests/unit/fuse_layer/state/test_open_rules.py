"""Tests of which files may not pass through: by name, by what is learned, and after a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.capture_bench import Bench, bench

from ciuic.fuse_layer.core import passthrough_writers
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials
from ciuic.fuse_layer.state import open_rules
from ciuic.fuse_layer.state.open_rules import OpenPreference, OpenRules

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
        (b"MANIFEST-000005", OpenPreference.TRACKED),
        (b"000004.log", OpenPreference.TRACKED),
        (b"events.out.tfevents.1700000000.host", OpenPreference.TRACKED),
        (b"metrics.jsonl", OpenPreference.TRACKED),
        (b"checkpoint.pt", OpenPreference.ANY),
        (b"model.safetensors", OpenPreference.ANY),
        (b"000012.sst", OpenPreference.ANY),
        (b"\xff.log", OpenPreference.TRACKED),
        (b"a.log\n", OpenPreference.ANY),
        (b"data.mdb", OpenPreference.CACHED),
    ],
)
def test_names_of_new_files(name: bytes, wish: OpenPreference, tmp_path: Path) -> None:
    """New logs are tracked, databases cached, checkpoints passed through.

    Read-write and existing files are not tracked by name.
    """
    rules, attributes = OpenRules(), of_size(tmp_path / "file")
    assert rules.preference(name, 1, WRITE, attributes, fresh=True) is wish
    if wish is OpenPreference.TRACKED:
        assert rules.preference(name, 1, BOTH, attributes, fresh=True) is OpenPreference.ANY
        assert rules.preference(name, 1, READ, attributes, fresh=False) is OpenPreference.ANY


def test_a_data_set_keeps_the_speed_of_the_disk(tmp_path: Path) -> None:
    """A large database that was not written lately passes through; a small or lately written one does not."""
    rules = OpenRules()
    for size, age_seconds, wish in (
        (open_rules.MAX_CACHED_BYTES, 10**6, OpenPreference.CACHED),
        (open_rules.MAX_CACHED_BYTES + 1, 10**6, OpenPreference.ANY),
        (open_rules.MAX_CACHED_BYTES + 1, 60, OpenPreference.CACHED),
    ):
        attributes = of_size(tmp_path / "data.mdb", size, age_seconds)
        assert rules.preference(b"data.mdb", 1, READ, attributes, fresh=False) is wish


def test_other_names_and_none(tmp_path: Path) -> None:
    """A configured list replaces the default, and an empty one switches the rule off."""
    attributes = of_size(tmp_path / "file")
    for rules, name, wish in (
        (OpenRules(["*.trace"], []), b"a.trace", OpenPreference.TRACKED),
        (OpenRules(["*.trace"], []), b"a.log", OpenPreference.ANY),
        (OpenRules([], []), b"a.mdb", OpenPreference.ANY),
        (OpenRules([], ["[ab].bin"]), b"a.bin", OpenPreference.CACHED),
    ):
        assert rules.preference(name, 1, WRITE, attributes, fresh=True) is wish


def test_learned_rules_outlive_the_worker(tmp_path: Path, state_fd: int) -> None:
    """Learned names, digits aside, and inodes outlive the worker, the newest of each."""
    rules = OpenRules()
    for number in range(open_rules.MAX_LEARNED_INODES + 1):
        rules.note_joined(number)
    rules.note_stayed(b"shard-0001.rec")
    rules.save(state_fd)
    later, attributes = OpenRules(), of_size(tmp_path / "file")
    later.load(state_fd)
    for known in (rules, later):
        assert (
            known.preference(b"shard-0739.rec", 10**9, WRITE, attributes, fresh=True)
            is OpenPreference.TRACKED
        )
        assert known.preference(b"other", 1, READ, attributes, fresh=False) is OpenPreference.CACHED
        assert known.preference(b"other", 0, READ, attributes, fresh=False) is OpenPreference.ANY


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x92\x01\x02", b"\x93\xff" * 50])
def test_a_file_that_means_nothing_is_none(tmp_path: Path, state_fd: int, content: bytes) -> None:
    """A state file with any other content counts as none."""
    (tmp_path / "opens").write_bytes(content)
    rules = OpenRules()
    rules.load(state_fd)
    assert rules.preference(b"x", 1, WRITE, of_size(tmp_path / "x"), fresh=True) is OpenPreference.ANY
    (tmp_path / "opens").unlink()
    os.mkfifo(tmp_path / "opens")
    # Loading a FIFO returns instead of blocking.
    rules.load(state_fd)


def test_a_state_directory_that_cannot_be_written(tmp_path: Path, state_fd: int) -> None:
    """A state directory that cannot be written loses only what was learned."""
    (tmp_path / "opens").mkdir()
    rules = OpenRules()
    rules.note_joined(5)
    rules.save(state_fd)
    assert rules.preference(b"x", 5, READ, of_size(tmp_path / "x"), fresh=False) is OpenPreference.CACHED


@pytest.fixture
def here() -> Iterator[Bench]:
    with bench() as made:
        yield made


def test_a_name_that_stays_open_over_cuts_is_learned(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file open at two cuts and for a minute is no checkpoint: later ones of its kind are tracked.

    The next worker knows that, too.
    """
    now = 1000.0
    monkeypatch.setattr(passthrough_writers.time, "monotonic", lambda: now)
    attr, handle = here.core.names.create(ROOT_ID, b"part-1", 0o644, os.O_WRONLY, Credentials(0, 0))
    here.core.files.is_unseen(handle)
    wishes = []
    for seconds in (0.0, 30.0, 31.0):
        now += seconds
        here.core.committed(here.core.cut().epoch)
        wishes.append(here.core.preference(attr.node, os.O_WRONLY, fresh=True))
    assert wishes == [OpenPreference.ANY, OpenPreference.ANY, OpenPreference.TRACKED]
    here.core.files.release(handle)
    here.start_again("6" * 32)
    node = here.core.names.lookup(ROOT_ID, b"part-1").node
    assert here.core.preference(node, os.O_WRONLY, fresh=True) is OpenPreference.TRACKED

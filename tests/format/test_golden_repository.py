"""Tests that the golden repository committed with each format version can still be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import golden_recipe as recipe

from ciuic.repository import Repository, Walker
from ciuic.repository.config import read_config
from ciuic.types import Entry, SnapshotId

GOLDEN = sorted(Path(__file__).parent.glob("golden-[0-9]"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    shutil.copytree(request.param, tmp_path / "r")
    with Repository.open(tmp_path / "r") as repository:
        yield repository


def _content(repository: Repository, entry: Entry) -> bytes:
    data = bytearray(entry.size_bytes)
    blocks = -(-entry.size_bytes // recipe.BLOCK)
    for at, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks):
        block = repository.chunks.get(chunk)
        data[at * recipe.BLOCK : at * recipe.BLOCK + len(block)] = block
    return bytes(data)


def test_there_is_a_golden_repository_of_each_format() -> None:
    """The folder has a golden repository of each format, so the other tests of this file cover them."""
    assert [read_config(str(path)).format for path in GOLDEN] == [1, 2, 3]
    assert read_config(str(GOLDEN[2])).identity() == recipe.IDENTITY


def test_every_byte_is_sound(golden: Repository) -> None:
    """Verifying a golden repository reports no damage."""
    assert list(golden.scrub()) == []
    assert golden.snapshots.unreadable() == []
    assert golden.config_damage() == []


def test_snapshots_have_their_recorded_values(golden: Repository) -> None:
    """Names, times, tags, marks and sizes are those recorded when the repository was made."""
    second, first = golden.snapshots.list()
    assert (first.id, first.time_ns, first.tags) == ("cs-000001", recipe.TIME_NS, ("first", "golden"))
    assert (first.message, first.host, first.roots) == ("every kind of entry", "gpu-1", (b"/srv/training",))
    assert first.size_bytes == (1 + recipe.SPARSE_BLOCKS + 10) * recipe.BLOCK + len(recipe.TEXT) + 4 + 7
    assert first.files == 10
    assert (second.parent, second.tags, second.held, second.hold_reason) == (
        "cs-000001",
        ("marked",),
        True,
        "kept",
    )
    assert second.roots == (b"/srv/state", b"/srv/empty")
    root = golden.snapshots.load(SnapshotId("cs-000001")).roots[0]
    assert (root.session, root.epoch, root.mode) == ("00112233445566778899aabbccddeeff", 5, "tracked")


def test_contents_and_attributes_are_restored(golden: Repository) -> None:
    """Contents, holes, links, attributes and odd names are restored."""
    root = golden.snapshots.load(SnapshotId("cs-000001")).roots[0]
    entries = {entry.name: entry for entry in golden.trees.entries(root.entry.content)}
    assert _content(golden, entries[b"raw.bin"]) == recipe.RAW
    assert golden.trees.xattrs(entries[b"raw.bin"]) == recipe.XATTRS_LONG
    assert _content(golden, entries[b"train.log"]) == recipe.TEXT
    assert entries[b"train.log"].flags == 1
    sparse = entries[b"sparse"]
    blocks = dict(golden.block_maps.ids(sparse.content, sparse.map_height, recipe.SPARSE_BLOCKS))
    assert {at: golden.chunks.get(chunk)[:1] for at, chunk in blocks.items()} == {0: b"\1", 2000: b"\2"}
    assert (entries[b"hole"].content, entries[b"hole"].size_bytes) == (b"", 10 * recipe.BLOCK)
    linked = golden.trees.link(root.links, entries[b"link-b"].link)
    assert linked is not None
    assert _content(golden, linked) == b"linked\n"
    assert entries[b"to"].target == b"../elsewhere\xff"
    assert entries[b"fifo"].mtime_ns == -1
    assert entries[b"null"].rdev == 0x103
    below = list(golden.trees.entries(entries[b"below"].content))
    assert [entry.name for entry in below] == [recipe.ODD_NAME]
    assert golden.trees.xattrs(below[0]) == recipe.XATTRS_SHORT
    state = golden.snapshots.load(SnapshotId("cs-000002")).roots[0].entry.content
    assert [_content(golden, entry) for entry in golden.trees.entries(state)] == [
        n + b"\n" for n in recipe.NAMES
    ]
    reached = {item.kind for item in Walker(golden).walk(golden.snapshots.load(SnapshotId("cs-000001")))}
    assert reached == {"tree", "links", "map", "xattrs", "data"}


def test_the_same_content_is_stored_under_the_same_names(golden: Repository) -> None:
    """Capturing the same content again adds no byte: hash, tree shape, node and map encoding are the same."""
    with golden.writer() as writer:
        first, second = recipe.first_draft(writer), recipe.second_draft(writer)
        writer.flush()
        assert writer.new_bytes == 0
        assert first.roots == golden.snapshots.load(SnapshotId("cs-000001")).roots
        assert second.roots == golden.snapshots.load(SnapshotId("cs-000002")).roots
    assert golden.check_index() == []


@pytest.mark.parametrize("golden", [path for path in GOLDEN if path.name != "golden-1"], indirect=True)
def test_chunks_stored_relative_to_a_twin_read_back(golden: Repository) -> None:
    """A chunk stored relative to its twin is there from format 2 on, and reads as the recipe says."""
    with golden.writer() as writer:
        recipe.put_relative_to_twins(writer)
        writer.flush()
        assert writer.new_bytes == 0
    for data in (recipe.MASTERS, recipe.WIDE_HALVES):
        found = golden.chunks.locate(golden.chunks.identity.chunk_id(data))
        assert found.base
        assert found.stored_bytes < 0.7 * len(data)
        assert golden.chunks.get(golden.chunks.identity.chunk_id(data)) == data

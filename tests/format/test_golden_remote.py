"""Tests of the golden remotes: ciuic opens them, and so does the reader that knows the pages alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import format_page
from support import golden_recipe as content
from support import remote_recipe as fixed
from support import remote_recipe as recipe

from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import open_remote
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.reading.opening import ReadableRemote, read_remote

EXPECTED = {"cs-000001", "cs-000002", recipe.OWN_IDENTITY}


@pytest.fixture(params=recipe.KINDS)
def golden(request: pytest.FixtureRequest) -> Path:
    return recipe.GOLDEN / str(request.param)


def page_spaces(golden: Path) -> list[format_page.PageRemote]:
    """Return the remote and the spaces of repositories in it, opened by the page's reader."""
    master = None
    if golden.name == "sealed":
        data = (golden / "keys/file").read_bytes()
        id_ = format_page.remote_id((golden / "remote.json").read_bytes())
        master = format_page.master_key("file", data, id_, fixed.KEY_FILE)
    own = sorted((golden / "repositories").iterdir())
    return [format_page.PageRemote(place, master) for place in (golden, *own)]


def page_chunks(space: format_page.PageRemote) -> format_page.PageChunks:
    return format_page.PageChunks(
        space.chunks(), space.chunk_id, space.border_seed, space.config["block_size"]
    )


def test_the_page_lists_the_snapshots(golden: Path) -> None:
    """Logs and manifests, read as the page says, name what exists; what was given up is not among it."""
    found = {}
    for space in page_spaces(golden):
        for name, digest in space.snapshots().items():
            manifest = space.manifest(name, digest)
            snapshot = format_page.enveloped(manifest["snapshot"], b"CIUICSNP")
            found[snapshot["id"]] = (manifest["host"], manifest["job"], manifest["epoch"], manifest["step"])
            if snapshot["id"] == "cs-000002":
                assert format_page.enveloped(manifest["marks"], b"CIUICMRK")["tags"] == ["marked"]
    assert found == {
        "cs-000001": ("alpha", "", None, None),
        "cs-000002": ("alpha", *recipe.LABELS),
        recipe.OWN_IDENTITY: ("old", "", None, None),
    }


def test_the_page_extracts_the_files(golden: Path, tmp_path: Path) -> None:
    """Every file of every snapshot comes out of the packs with its content, read as the two pages say."""
    extracted = 0
    for space in page_spaces(golden):
        chunks = page_chunks(space)
        assert {stored.flags for stored in chunks.stored.values()} >= {0, 1}
        for name, digest in space.snapshots().items():
            snapshot = format_page.enveloped(space.manifest(name, digest)["snapshot"], b"CIUICSNP")
            for number, root in enumerate(snapshot["roots"]):
                place = tmp_path / f"{snapshot['id']}-{number}"
                chunks.extract(root, str(place))
                extracted += sum(path.is_file() for path in place.rglob("*"))
    for id_ in ("cs-000001", recipe.OWN_IDENTITY):
        first = tmp_path / f"{id_}-0"
        assert (first / "raw.bin").read_bytes() == content.RAW
        assert (first / "train.log").read_bytes() == content.TEXT
        assert (first / "sparse").stat().st_size == content.SPARSE_BLOCKS * content.BLOCK
        assert (first / "link-a").read_bytes() == (first / "link-b").read_bytes() == b"linked\n"
        assert Path(os.fsdecode(bytes(first / "below") + b"/" + content.ODD_NAME)).read_bytes() == b"odd\n"
        assert os.readlink(bytes(first / "to")) == b"../elsewhere\xff"
    second = tmp_path / "cs-000002-0"
    assert sorted(os.listdir(bytes(second))) == content.NAMES
    assert all((second / os.fsdecode(name)).read_bytes() == name + b"\n" for name in content.NAMES)
    assert extracted == 2 * 8 + len(content.NAMES)


def test_the_remote_has_every_way_to_store_a_chunk(golden: Path) -> None:
    """Planes and differences are among the records, so that the other tests cover them."""
    flags = {stored.flags for space in page_spaces(golden) for stored in space.chunks().values()}
    assert flags == {0, 1, 2, 6}


def test_nothing_is_left_of_what_was_collected(golden: Path) -> None:
    """No pack has the chunk that the given-up snapshot alone needed, and a finished round condemned its packs."""
    space = page_spaces(golden)[0]
    condemned = space.round(0, ".final")["condemned"]
    assert condemned
    assert not set(condemned) & set(space.pack_refs())
    assert space.chunk_id(bytes(reversed(content.RAW))) not in space.chunks()
    assert space.chunk_id(content.RAW) in space.chunks()


@pytest.fixture
def opened(golden: Path, tmp_path: Path) -> Iterator[ReadableRemote]:
    # A copy: no reader may change a remote, and none may change this one.
    shutil.copytree(golden, tmp_path / "remote")
    objects = DirectoryObjects(str(tmp_path / "remote"))
    secrets = [fixed.secrets()["paper"]] if golden.name == "sealed" else []
    with read_remote(open_remote(objects, secrets), cache_root=tmp_path / "cache") as remote:
        yield remote


def test_every_later_ciuic_reads_it(opened: ReadableRemote) -> None:
    """All snapshots are listed, and every byte of them verifies."""
    assert set(opened.snapshots.ids()) == EXPECTED
    assert len(opened.repositories) == 2
    for repository in opened.repositories:
        assert verify_snapshots(repository, checksum=True).damages == []

"""Verification by a sample: all of the structure, and as many blocks as the share says."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.remote_host import BLOCK, RemoteHost, flip_object, new_remote, reading
from support.restoring import write

from ciuic.maintenance.verify import verify_sample
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket

BLOCKS = 400


@pytest.fixture
def host(tmp_path: Path) -> object:
    name = f"sample-{os.urandom(6).hex()}"
    made = RemoteHost(tmp_path / "host", new_remote(MemoryObjects(name)))
    write(made.root / "file", random.Random(1).randbytes(BLOCKS * BLOCK))
    made.snapshot()
    made.upload()
    yield made
    forget_bucket(name)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_as_much_is_read_as_was_asked_for(host: RemoteHost, tmp_path: Path, share: float) -> None:
    """A sound remote passes, and the blocks that were read are the share within five standard deviations."""
    seen = []
    with reading(host.remote, tmp_path / "cache") as opened:
        (repository,) = opened.repositories
        result = verify_sample(repository, None, share, rng=random.Random(2), progress=seen.append)
    assert result.damages == []
    assert result.files == 1
    deviation = (BLOCKS * share * (1 - share)) ** 0.5
    assert abs(result.bytes_read / BLOCK - share * BLOCKS) <= 5 * deviation
    # Content is what is read last: the last state has all of it.
    assert seen[-1].bytes_done == result.bytes_read


def test_damage_of_a_block_that_was_read_is_named(host: RemoteHost, tmp_path: Path) -> None:
    """A changed block is found if it is among those that were read; a lost pack in any case."""
    largest = max(host.remote.objects.list("packs/data/"), key=lambda info: info.size_bytes)
    flip_object(host.remote.objects, largest.name, largest.size_bytes // 2)
    found = []
    for seed in range(8):
        with reading(host.remote, tmp_path / "cache") as opened:
            result = verify_sample(opened.repositories[0], None, 0.5, rng=random.Random(seed))
        found.append([damage.path for damage in result.damages])
    assert [] in found
    assert [os.fsencode(host.root / "file")] in found
    host.remote.objects.delete([largest.name])
    with reading(host.remote, tmp_path / "other cache") as opened:
        assert verify_sample(opened.repositories[0], None, 0.0).damaged

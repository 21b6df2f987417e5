"""Tests of hostile structures, read with little memory in bounded time: bombs, cycles, giant nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hostile
from support.hostile_structures import BOMBS, SHAPES, any_graph, build, forging
from support.trees import assert_same, manifest

_TESTS = Path(__file__).parents[1]
_ROOM_BYTES = 768 << 20
"""Memory beyond what the interpreter has, in bytes; stacks and arenas of a restore's threads take half of it.
"""
_CPU_SECONDS = 120
"""CPU limit in seconds: each command takes seconds, an exponential one would never end."""
_CHILD = """
import os, resource, sys
sys.path[:0] = sys.argv[3:5]
from pathlib import Path
from support import hostile, hostile_structures
from ciuic.errors import CiuicError
from ciuic.repository import Repository

path, shape = Path(sys.argv[1]), sys.argv[2]
with hostile_structures.forging() as forged:
    hostile_structures.build(path, forged, getattr(hostile_structures, shape))
    size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[5]),) * 2)
    used = int(sum(os.times()[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(sys.argv[6]),) * 2)
    uses = [hostile._list, hostile._look_up, hostile._verify, hostile._check, hostile._prune]
    if shape not in hostile_structures.BOMBS:
        uses += [hostile._diff, lambda repository: hostile._restore(repository, path.parent / "target")]
    for use in uses:
        with Repository.open(path) as repository:
            try:
                use(repository)
            except CiuicError as error:
                print(error.message[:300])
"""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_hostile_shapes_are_read_in_bounded_memory_and_time(tmp_path: Path, shape: object) -> None:
    """Every command on a hostile structure ends with an answer or an error within RLIMIT_AS and RLIMIT_CPU.

    The commands are list, look up, verify, check, repair and prune, and, where the structure is no bomb, diff
    and restore.
    """
    name = getattr(shape, "__name__")  # noqa: B009
    arguments = (
        str(tmp_path / "repository"),
        name,
        str(_TESTS),
        str(_TESTS.parent),
        str(_ROOM_BYTES),
        str(_CPU_SECONDS),
    )
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False, timeout=280
    )  # fmt: skip
    # shutil.rmtree is recursive and would end in RecursionError.
    subprocess.run(["rm", "-rf", str(tmp_path / "target")], check=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_unrestored_shapes_exist() -> None:
    """The names of shapes that are not restored are names of existing shapes."""
    assert set(BOMBS) <= {shape.__name__ for shape in SHAPES}


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """Return a directory, in memory where possible: restores sync every file."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ciuic-hostile-", dir=place) as made:
        yield Path(made)


@given(data=st.data())
def test_any_graph_of_chunks_is_refused_or_read(top: Path, data: st.DataObject) -> None:
    """Any graph of chunks is read or refused with a CiuicError, and nothing outside the destination changes.

    Trees, maps and differences refer to each other in any way, themselves included.
    """
    area = Path(tempfile.mkdtemp(dir=top))
    (area / "outside").mkdir()
    (area / "outside/file").write_bytes(b"must stay as it is")
    before = manifest(area / "outside")
    try:
        with forging() as forged:
            build(area / "repository", forged, lambda forger, path: any_graph(data.draw, forger, path))
            hostile.use_everything(area / "repository", area)
        assert_same(before, manifest(area / "outside"))
        assert {entry.name for entry in area.iterdir()} <= {"repository", "outside", "target"}
    finally:
        shutil.rmtree(area)

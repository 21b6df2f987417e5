"""Tests that no reader allocates memory for a size claimed on disk, in a child with limited memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_ROOM_BYTES = 192 << 20
"""Memory beyond what the interpreter has, in bytes: a chunk has 16 MiB at most, a small file 64 MiB."""
_HEAD = f"""
import os, resource, sys
sys.path[:0] = [{str(_TESTS)!r}, {str(_TESTS.parent)!r}]
from pathlib import Path
import zstandard
from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.repository import pack_format as pf
from support.readers import readers, refused_or_read
from support.small_repository import BLOCK, content, make_snapshot, put_file
from support import hostile

def limit(room={_ROOM_BYTES}):
    size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + room,) * 2)
"""


def _child(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + script, *arguments], capture_output=True, text=True, check=False, timeout=200
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_limit_holds() -> None:
    """The children of this module do fail when they allocate a claimed size."""
    with pytest.raises(AssertionError, match="MemoryError"):
        _child("limit(); bytes(1 << 30)")


def test_no_decoder_allocates_for_a_number() -> None:
    """Arrays, maps, strings and extensions that claim 2^32 elements are refused without allocating for them.

    They are put in at every place of the input of every decoder.
    """
    out = _child("""
limit()
claims = [bytes([code]) + b"\\xff" * 4 for code in (0xDD, 0xDF, 0xC6, 0xDB, 0xC9)] + [b"\\xdd\\x0f\\xff\\xff\\xff"]
tried = 0
for reader in readers():
    for claim in claims:
        for at in range(min(len(reader.valid), 400) + 1):
            for width in (0, 1):
                refused_or_read(reader, reader.valid[:at] + claim + reader.valid[at + width :])
                tried += 1
print(tried)
""")
    # The lines before the last one are log messages of decoders.
    assert int(out.splitlines()[-1]) > 15_000


def test_a_compressed_chunk_unpacks_to_its_recorded_length_or_is_refused() -> None:
    """Frames with any claimed size unpack to their record's length, 16 MiB at most, or are refused."""
    _child("""
from ciuic.repository.chunk_reader import BadCopyError, unpack
compress = zstandard.ZstdCompressor(level=3).compressobj(size=1 << 30)
piece, frames = bytes(1 << 20), []
frames.append(b"".join([compress.compress(piece) for _ in range(1024)]) + compress.flush())
compress = zstandard.ZstdCompressor(level=3, write_content_size=False).compressobj()
frames.append(b"".join([compress.compress(piece) for _ in range(1024)]) + compress.flush())
small = zstandard.ZstdCompressor(level=3).compress(piece)
for width in range(4, 14):  # what the header says of size and window
    frames.append(small[:4] + b"\\xe0" + (1 << 62).to_bytes(8, "little") + small[width:])
    frames.append(small[:4] + b"\\x00\\xff" + small[width:])
    frames.append(small[:width] + b"\\xff" * 4 + small[width + 4 :])
limit()
for frame in frames:
    for raw in (0, 1, len(piece), 16 << 20, 1 << 30, 1 << 62):
        try:
            assert len(unpack(frame, raw, pf.FLAG_ZSTD)) == raw <= 16 << 20
        except BadCopyError:
            pass
assert unpack(small, len(piece), pf.FLAG_ZSTD) == piece
""")


_SPARSE = """
path, what = Path(sys.argv[1]), sys.argv[2]
with Repository.create(path, block_size=BLOCK) as repository, repository.writer(pack_bytes=1) as writer:
    make_snapshot(writer, hostile.ID, {b"a": content(2, 3)}, time_ns=10**18)
packs = sorted((path / "packs").iterdir())
number = int(packs[0].stem, 16)
if what == "footer":  # a terabyte, of which a fifth is a footer
    size = 1 << 40
    records = (1 << 32) - 1
    trailer = pf._TRAILER.pack(pf._FOOTER_MAGIC, records, 0, size - records * pf.RECORD_BYTES - pf.TRAILER_BYTES, 0)
    with open(packs[0], "r+b") as file:
        os.pwrite(file.fileno(), trailer, size - pf.TRAILER_BYTES)
elif what == "pack":
    os.truncate(packs[0], 1 << 40)
elif what == "gap":  # a table whose one payload begins a terabyte behind it
    head = packs[0].read_bytes()[: pf.ALIGN_BYTES]
    record = pf.PackRecord(pf.ChunkId(b"x" * 16), 1 << 33, 10, 10, 0, 0)
    payload = (1 << 33) + 10 - pf.ALIGN_BYTES - (pf.SEGMENT_HEAD_BYTES + pf.RECORD_BYTES + 8)
    table = pf.encode_table(pf.ALIGN_BYTES, [record], payload)
    packs[0].write_bytes(head + table)
    os.truncate(packs[0], 1 << 34)
else:
    victim = path / what
    os.truncate(victim, 1 << 40)
limit(2 << 30)  # the stacks and arenas of a restore's threads count as well
area = path.parent
(area / "outside").mkdir(exist_ok=True)
try:
    hostile.use_everything(path, area)
except CiuicError as error:
    print(error)
"""


@pytest.mark.parametrize("what", ["footer", "pack", "gap", "snapshots/cs-abcdef", "config"])
def test_files_that_are_sparse_and_endless(tmp_path: Path, what: str) -> None:
    """Sparse files of a terabyte are answered or refused by every reader soon and in little memory.

    The files are a pack, a footer, a snapshot file and a configuration.
    """
    _child(_SPARSE, str(tmp_path / "repository"), what)


def test_a_file_of_an_exabyte(tmp_path: Path) -> None:
    """Trees that claim a file of 2^61 bytes, and a map of the greatest height, use no memory for holes."""
    _child(
        """
path = Path(sys.argv[1])
from ciuic.types import Entry
from ciuic.repository.block_maps import encode_map_node
import msgspec
with Repository.create(path, block_size=BLOCK) as repository:
    with repository.writer() as writer:
        snapshot = make_snapshot(writer, "cs-000001", {b"a": content(2, 3)})
        node = writer.put_chunk(content(2, 1))
        for height in range(1, 6):
            node = writer._put_meta(encode_map_node(height, [node]))
        huge = Entry(name=b"b", mode=0o100600, size_bytes=1 << 61, content=node, map_height=5)
        none = Entry(name=b"c", mode=0o100600, size_bytes=1 << 61)
        tree = writer.update_tree(snapshot.roots[0].entry.content, {b"b": huge, b"c": none})
        root = msgspec.structs.replace(snapshot.roots[0].entry, content=tree.id)
        from ciuic.types import SnapshotDraft
        writer.commit(SnapshotDraft(id=hostile.ID, time_ns=10**18, host="h",
                                    roots=(msgspec.structs.replace(snapshot.roots[0], entry=root),)))
limit(2 << 30)  # the stacks and arenas of a restore's threads count as well
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
(path.parent / "outside").mkdir()
hostile.use_everything(path, path.parent)
""",
        str(tmp_path / "repository"),
    )

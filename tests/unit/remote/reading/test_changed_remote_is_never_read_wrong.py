"""Reading of a remote that somebody changed, or that lost something: never wrong content."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import trees
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.errors import Damaged
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.log_reader import RolledBack
from ciuic.remote.object_names import PACKS_PREFIX, new_pack_ref, pack_name, parse_pack
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.pack import RemotePackReader, RemotePackWriter
from ciuic.repository import Repository
from ciuic.repository.errors import DamagedSnapshot
from ciuic.restore import execute, plan_restore
from ciuic.restore.journal import JOURNAL_NAME
from ciuic.types import Snapshot

RESTORE_MARK = os.fsdecode(JOURNAL_NAME)


class Stored:
    """A remote with one snapshot, and the tree that it shows."""

    def __init__(self, place: Path, *, sealed: bool) -> None:
        self.place = place
        self.bucket = f"damage-{os.urandom(6).hex()}"
        self.remote: Remote = new_remote(MemoryObjects(self.bucket), sealed=sealed)
        self.host = RemoteHost(place / "host", self.remote)
        rng = random.Random(5)
        for number in range(6):
            write(self.host.root / f"{number}", rng.randbytes(20 * BLOCK))
        write(self.host.root / "hidden folder" / "text", b"words " * 5000)
        self.manifest = trees.manifest(self.host.root)
        self.snapshot: Snapshot = self.host.snapshot()
        self.host.upload()

    def names(self, prefix: str) -> list[str]:
        return [info.name for info in self.remote.objects.list(prefix)]

    def put(self, name: str, data: bytes) -> None:
        self.remote.objects.put(name, [data])

    def restore(self, repository: Repository) -> tuple[bool, Path]:
        """Restore; return whether everything came back, and where."""
        there = Path(tempfile.mkdtemp(dir=self.place))
        plan = plan_restore(repository, self.snapshot, [os.fsencode(self.host.root)], dest=os.fsencode(there))
        return execute(plan).complete, there / self.host.root.name

    def assert_never_wrong(self, cache: Path) -> bool:
        """Restore what can be restored; assert that no file has other content; return whether all came back."""
        try:
            with reading(self.remote, cache) as opened:
                complete, there = self.restore(opened.repositories[0])
        except Damaged:
            return False
        for path in there.rglob("*"):
            # The mark of a restore that has not ended is none of the snapshot's files.
            if path.is_file() and path.name != RESTORE_MARK:
                assert path.read_bytes() == (self.host.root / path.relative_to(there)).read_bytes()
        if complete:
            trees.assert_same(self.manifest, trees.manifest(there))
        return complete


@pytest.fixture(params=[True, False], ids=["sealed", "in clear"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path, sealed=request.param)
    yield made
    forget_bucket(made.bucket)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_changed_objects_give_no_wrong_content(
    stored: Stored, tmp_path: Path, seed: int, cached: bool
) -> None:
    """Any object that is flipped, cut, lengthened, emptied, swapped or gone is refused, or read as it was."""
    rng = random.Random(seed)
    cache = tmp_path / "cache"
    if cached:
        with reading(stored.remote, cache) as opened:
            verify_snapshots(opened.repositories[0])
    names = [name for name in stored.names("") if name != "remote.json"]
    for name in rng.sample(names, k=rng.choice((1, 1, 2, len(names)))):
        data = bytearray(stored.remote.objects.get(name))
        what = rng.choice(("flip", "flip", "cut", "lengthen", "empty", "swap", "remove"))
        if what == "remove":
            stored.remote.objects.delete([name])
            continue
        if what == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif what == "cut":
            del data[rng.randrange(len(data)) :]
        elif what == "lengthen":
            data += rng.randbytes(rng.randrange(1, 100))
        elif what == "empty":
            data.clear()
        else:
            other = rng.choice([one for one in names if one != name])
            data = bytearray(stored.remote.objects.get(other)) if other in stored.names("") else data
        stored.put(name, bytes(data))
    stored.assert_never_wrong(cache)


def test_damage_of_data_is_named(stored: Stored, tmp_path: Path) -> None:
    """A flipped byte of a record is named with path, block and pack; all other files are restored."""
    (name,) = stored.names(f"{PACKS_PREFIX}data/")
    ref = parse_pack(name)
    assert ref is not None
    records = RemotePackReader(stored.remote.sealer, ref).read_table(stored.remote.objects)
    # Neither compressed nor shared with others.
    record = next(record for record in records if not record.flags and record.raw_bytes == BLOCK)
    data = bytearray(stored.remote.objects.get(name))
    data[record.offset + 7] ^= 1
    stored.put(name, bytes(data))
    with reading(stored.remote, tmp_path / "cache") as opened:
        repository = opened.repositories[0]
        for ids in (None, [stored.snapshot.id]):
            damages = verify_snapshots(repository, ids, checksum=True).damages
            assert {(damage.kind, damage.chunk) for damage in damages} == {("data", record.id)}
            assert {damage.file for damage in damages} == {f"{stored.remote.objects.url}/{name}"}
            assert damages[0].path.startswith(os.fsencode(stored.host.root))
        assert verify_snapshots(repository).damages == []
        complete, there = stored.restore(repository)
    assert not complete
    whole = {"0", "1", "2", "3", "4", "5", "text"} - {os.path.basename(os.fsdecode(damages[0].path))}
    assert {path.name for path in there.rglob("*") if path.is_file()} - {RESTORE_MARK} == whole


def test_a_second_copy_is_read_instead(stored: Stored, tmp_path: Path) -> None:
    """A chunk whose first copy is damaged or gone is read from another pack, also one uploaded after the index was made."""
    cache = tmp_path / "cache"
    with reading(stored.remote, cache) as opened:
        assert verify_snapshots(opened.repositories[0]).damages == []
    copied = []
    for name in stored.names(PACKS_PREFIX):
        ref = parse_pack(name)
        assert ref is not None
        reader = RemotePackReader(stored.remote.sealer, ref)
        records = reader.read_table(stored.remote.objects)
        writer = RemotePackWriter(stored.remote.sealer, new_pack_ref("data" if ref[0] == "d" else "meta"))
        for record, content in zip(records, reader.read_records(stored.remote.objects, records), strict=True):
            writer.add(record, content)
        stored.remote.objects.put(writer.name, writer.finish())
        copied.append(name)
    damaged, *gone = copied
    data = bytearray(stored.remote.objects.get(damaged))
    data[64 : len(data) // 2] = bytes(len(data) // 2 - 64)
    stored.put(damaged, bytes(data))
    stored.remote.objects.delete(gone)
    assert stored.assert_never_wrong(cache)
    assert stored.assert_never_wrong(tmp_path / "other cache")


def test_a_lost_pack_is_damage(stored: Stored, tmp_path: Path) -> None:
    """Without its data packs a snapshot is listed and shown, and verifies as damaged."""
    with reading(stored.remote, tmp_path / "cache") as opened:
        assert verify_snapshots(opened.repositories[0], checksum=True).damages == []
    stored.remote.objects.delete(stored.names(f"{PACKS_PREFIX}data/"))
    with reading(stored.remote, tmp_path / "cache") as opened:
        assert opened.snapshots.ids() == [stored.snapshot.id]
        for checksum in (False, True):
            assert verify_snapshots(opened.repositories[0], checksum=checksum).damaged


def test_a_pack_without_table_is_named(stored: Stored, tmp_path: Path) -> None:
    """A pack whose end is cut is damage of that object, whether or not a snapshot needs it."""
    (name,) = stored.names(f"{PACKS_PREFIX}data/")
    data = bytes(stored.remote.objects.get(name))
    other = pack_name(new_pack_ref("data"))
    stored.put(other, data[:-40])
    with reading(stored.remote, tmp_path / "cache") as opened:
        damages = verify_snapshots(opened.repositories[0], checksum=True).damages
    assert [(damage.kind, damage.file) for damage in damages] == [
        ("pack", f"{stored.remote.objects.url}/{other}")
    ]


def test_another_manifest_is_refused(stored: Stored, tmp_path: Path) -> None:
    """A manifest that was replaced by another one, or is gone, is named; the snapshot is not read."""
    (name,) = stored.names("manifests/")
    write(stored.host.root / "later", b"later")
    later = stored.host.snapshot()
    stored.host.upload()
    (other,) = set(stored.names("manifests/")) - {name}
    stored.put(name, bytes(stored.remote.objects.get(other)))
    with reading(stored.remote, tmp_path / "cache") as opened:
        assert opened.snapshots.ids() == [later.id]
        (bad,) = opened.snapshots.unreadable()
        assert (bad.id, bad.path) == (stored.snapshot.id, f"{stored.remote.objects.url}/{name}")
        with pytest.raises(DamagedSnapshot, match="not the one that was committed"):
            opened.snapshots.load(stored.snapshot.id)
    stored.remote.objects.delete([name])
    with (
        reading(stored.remote, tmp_path / "cache") as opened,
        pytest.raises(DamagedSnapshot, match="is missing in the remote"),
    ):
        opened.snapshots.load(stored.snapshot.id)


def test_an_older_state_is_refused(stored: Stored, tmp_path: Path) -> None:
    """A bucket that was put back to an earlier state is refused by a host that knows a later one."""
    before = {name: bytes(stored.remote.objects.get(name)) for name in stored.names("")}
    write(stored.host.root / "later", b"later")
    stored.host.snapshot()
    stored.host.upload()
    with reading(stored.remote, tmp_path / "cache"):
        pass
    stored.remote.objects.delete([name for name in stored.names("") if name not in before])
    with pytest.raises(RolledBack), reading(stored.remote, tmp_path / "cache"):
        pass
    with reading(stored.remote, tmp_path / "other cache") as opened:
        assert opened.snapshots.ids() == [stored.snapshot.id]


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_cache_is_read_around(stored: Stored, tmp_path: Path, seed: int) -> None:
    """Files of the cache that are flipped, cut, emptied, swapped or deleted cost time alone."""
    rng = random.Random(seed)
    cache = tmp_path / "cache"
    assert stored.assert_never_wrong(cache)
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        what = rng.choice(("flip", "cut", "empty", "remove", "swap", "leave"))
        data = bytearray(path.read_bytes())
        if what == "remove":
            path.unlink()
        elif what == "flip" and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif what == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif what == "empty":
            path.write_bytes(b"")
        elif what == "swap":
            other = rng.choice(files)
            if other.exists():
                path.write_bytes(other.read_bytes())
    assert stored.assert_never_wrong(cache)


def test_nothing_readable_lies_in_the_cache(tmp_path: Path) -> None:
    """The cache of a sealed remote has no name and no run of content of a file."""
    stored = Stored(tmp_path, sealed=True)
    try:
        assert stored.assert_never_wrong(tmp_path / "cache")
    finally:
        forget_bucket(stored.bucket)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert b"hidden folder" not in kept
    assert b"words words" not in kept
    assert os.fsencode(stored.host.root) not in kept
    assert (stored.host.root / "0").read_bytes()[:64] not in kept

"""The repository as its users call it: making, opening, locking, naming, marking, removing."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_repository import BLOCK, content, make_snapshot, put_file, read_files
from support.stored import IDENTITIES, flip_stored

from ciuic.errors import Busy, NotFound, UsageError
from ciuic.repository import Repository, RepositoryExists, Walker, is_zero, new_snapshot_id
from ciuic.repository.locks import Lock
from ciuic.repository.writing import chunk_store
from ciuic.types import ChunkId, Entry, RootRecord, SnapshotDraft, SnapshotId


@pytest.fixture(params=IDENTITIES)
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=BLOCK, identity=request.param) as made:
        yield made


def test_create_is_private_and_refuses_a_full_directory(tmp_path: Path) -> None:
    """The directory gets mode 0700 and the configuration 0600; a second create and a full directory fail."""
    with Repository.create(tmp_path / "r") as made:
        assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(made.path / "config").st_mode) == 0o600
        assert made.block_size == 262144
    with pytest.raises(RepositoryExists):
        Repository.create(tmp_path / "r")
    with pytest.raises(RepositoryExists):
        Repository.create(tmp_path)
    with pytest.raises(NotFound):
        Repository.open(tmp_path)
    with pytest.raises(NotFound):
        Repository.create(tmp_path / "missing" / "r")
    with pytest.raises(ValueError, match="power of two"):
        Repository.create(tmp_path / "s", block_size=5000)


def test_a_pack_of_tiny_chunks_is_sealed_too(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of tiny chunks is sealed at a number of chunks, as its whole table is read at once."""
    many = chunk_store.SEGMENT_RECORDS
    monkeypatch.setattr(chunk_store, "PACK_RECORDS", 2 * many)
    with repository.writer() as writer:
        ids = [writer.put_chunk(b"%d" % number) for number in range(5 * many)]
        writer.flush()
        listed = [len(list(repository.pack_records(pack.number))) for pack in repository.packs()]
        assert listed == [2 * many, 2 * many, many]
        assert all(writer.chunks.get(ids[number]) == b"%d" % number for number in range(0, len(ids), 97))


def test_two_repositories_name_the_same_content_differently(tmp_path: Path) -> None:
    """Chunk ids depend on the repository's seed."""
    ids = []
    for name in ("a", "b"):
        with Repository.create(tmp_path / name) as made:
            ids.append(made.chunks.identity.chunk_id(b"same"))
    assert ids[0] != ids[1]


def test_one_writer_at_a_time_and_the_owner_is_named(repository: Repository) -> None:
    """A second writer gets Busy (75) with process and command of the first; readers are not disturbed."""
    with repository.writer(command="ciuic snapshot"):
        with pytest.raises(Busy, match=f"ciuic snapshot.*process {os.getpid()}") as caught:
            repository.writer()
        assert caught.value.exit_code == 75
        assert repository.snapshots.list() == []
    repository.writer().close()


def test_waiting_for_the_lock_ends_at_the_deadline(tmp_path: Path) -> None:
    """The lock is tried again until the deadline of the given clock with wait_seconds."""

    class Clock:
        now = 0.0
        slept = 0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float, /) -> None:
            self.now += seconds
            self.slept += 1

        def time_ns(self) -> int:
            return time.time_ns()

    clock = Clock()
    held = Lock.acquire(str(tmp_path))
    with pytest.raises(Busy):
        Lock.acquire(str(tmp_path), wait_seconds=3, clock=clock)
    assert clock.now >= 3
    assert clock.slept > 10
    held.release()


def test_the_lock_goes_with_the_process(repository: Repository) -> None:
    """A killed writer leaves no lock behind."""
    code = (
        "import os, sys; from ciuic.repository import Repository\n"
        "w = Repository.open(sys.argv[1]).writer(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(repository.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(Busy):
            repository.writer()
        child.kill()
        child.wait()
        repository.writer().close()


def test_equal_content_is_stored_once(repository: Repository) -> None:
    """The same blocks again, in one session, a later one or another file, add no data."""
    with repository.writer() as writer:
        first = make_snapshot(writer, "cs-000001", {b"a": content(2, 8), b"b": content(2, 8)})
        assert 8 * BLOCK < first.new_bytes < 8 * BLOCK + 3 * 4096 + 4096
        second = make_snapshot(writer, "cs-000002", {b"a": content(2, 8), b"b": content(2, 8)})
        assert second.new_bytes == 0
    with repository.writer() as writer:
        third = make_snapshot(writer, "cs-000003", {b"a": content(2, 8), b"b": content(2, 8)})
        assert third.new_bytes == 0
        assert (third.size_bytes, third.files) == (16 * BLOCK, 2)


def test_incompressible_blocks_are_stored_raw_and_aligned(repository: Repository) -> None:
    """Incompressible blocks of 64 KiB and more lie raw at 4 KiB boundaries; text is compressed."""
    with repository.writer() as writer:
        raw = writer.put_chunk(os.urandom(65536))
        small = writer.put_chunk(b"x")
        text = writer.put_chunk(b"loss 0.125 step 1000\n" * 4000)
        raw2 = writer.put_chunk(os.urandom(262144))
        writer.flush()
    for chunk in (raw, raw2):
        place = repository.chunks.locate(chunk)
        assert place.offset % 4096 == 0
        assert place.stored_bytes == place.raw_bytes
    place = repository.chunks.locate(text)
    assert place.stored_bytes < place.raw_bytes // 10
    assert repository.chunks.get(text) == b"loss 0.125 step 1000\n" * 4000
    assert repository.chunks.get(small) == b"x"


def test_a_writer_reads_its_own_unwritten_objects(repository: Repository) -> None:
    """A writer reads its own chunks, trees and maps before they are written and after a flush."""
    with repository.writer() as writer:
        chunk = writer.put_chunk(b"hello")
        assert writer.chunks.get(chunk) == b"hello"
        tree = writer.update_tree(b"", {b"f": put_file(writer, b"f", content(2, 3))})
        assert [entry.name for entry in writer.trees.entries(tree.id)] == [b"f"]
        writer.flush()
        assert writer.chunks.get(chunk) == b"hello"


def test_chunks_of_an_unfinished_capture_are_used_by_the_next(repository: Repository) -> None:
    """Chunks of a writer closed without commit are reused by the next capture."""
    with repository.writer() as writer:
        put_file(writer, b"f", content(2, 20))
    assert repository.snapshots.list() == []
    with repository.writer() as writer:
        put_file(writer, b"f", content(2, 20))
        assert make_snapshot(writer, "cs-000001", {b"f": content(2, 20)}).new_bytes < 2 * BLOCK


def test_commit_refuses_a_tree_that_is_not_there_and_an_id_twice(repository: Repository) -> None:
    """A snapshot without its trees, or a second one of the same id, is refused."""
    with repository.writer() as writer:
        make_snapshot(writer, "cs-000001", {b"a": b"x"})
        with pytest.raises(ValueError, match="already"):
            make_snapshot(writer, "cs-000001", {b"a": b"y"})
        root = Entry(name=b"", mode=0o40755, content=b"0" * 16)
        draft = SnapshotDraft(
            id=SnapshotId("cs-000002"), time_ns=1, host="", roots=(RootRecord(path=b"/r", entry=root),)
        )
        with pytest.raises(ValueError, match="not in the repository"):
            writer.commit(draft)
    assert repository.snapshots.ids() == ["cs-000001"]
    assert read_files(repository, "cs-000001") == {b"a": b"x"}


def test_marks_change_and_stay(repository: Repository) -> None:
    """Hold, reason and tags change one by one, survive reopening and index loss, and go with a snapshot."""
    id_ = SnapshotId("cs-000001")
    with repository.writer() as writer:
        make_snapshot(writer, id_, {})
        assert writer.set_marks(id_, hold=True, reason="paper").held
        writer.set_marks(id_, tags=["best", "best", "v1"])
    info = repository.snapshots.list()[0]
    assert (info.held, info.hold_reason, info.tags) == (True, "paper", ("best", "v1"))
    assert repository.snapshots.list(tag="v1") == [info]
    assert repository.snapshots.list(tag="v2") == []
    os.unlink(repository.path / "index.sqlite")
    assert repository.snapshots.list() == [info]
    with repository.writer() as writer:
        assert not writer.set_marks(id_, hold=False).hold_reason
        left = (repository.path / "marks" / id_).read_bytes()
        writer.remove_snapshots([id_])
        # As after a crash between the two removals.
        (repository.path / "marks" / id_).write_bytes(left)
        make_snapshot(writer, id_, {})
        with pytest.raises(NotFound):
            writer.set_marks(SnapshotId("cs-ffffff"), hold=True)
        with pytest.raises(NotFound):
            writer.remove_snapshots([id_, SnapshotId("cs-ffffff")])
    assert repository.snapshots.list()[0].tags == ()


def test_lists_are_filtered_newest_first(repository: Repository) -> None:
    """Snapshots are listed newest first; root, since, until and limit select."""
    with repository.writer() as writer:
        for number in range(1, 6):
            path = b"/even" if number % 2 == 0 else b"/odd\n|\xff"
            make_snapshot(writer, f"cs-00000{number}", {}, time_ns=number, path=path)
    store = repository.snapshots
    assert [info.time_ns for info in store.list()] == [5, 4, 3, 2, 1]
    assert [info.time_ns for info in store.list(root=b"/even")] == [4, 2]
    assert [info.time_ns for info in store.list(root=b"/odd\n|\xff", limit=2)] == [5, 3]
    assert [info.time_ns for info in store.list(since_ns=2, until_ns=4)] == [4, 3, 2]
    latest = store.latest(b"/even")
    assert latest is not None
    assert latest.time_ns == 4


def test_names_of_snapshots_resolve_as_documented(repository: Repository) -> None:
    """Ids, prefixes, latest, latest~N and times resolve as documented for the command line."""

    def ns(text: str) -> int:
        return int(datetime.fromisoformat(text).timestamp() * 10**9)

    with repository.writer() as writer:
        make_snapshot(writer, "cs-38a2b1", {}, time_ns=ns("2023-06-15 15:00:07.500"))
        make_snapshot(writer, "cs-38ffff", {}, time_ns=ns("2023-06-15 16:00:00"))
        make_snapshot(writer, "cs-38a2b1ff", {}, time_ns=ns("2023-06-16 16:00:00"))
    resolve = repository.snapshots.resolve
    assert resolve("cs-38a2b1") == "cs-38a2b1"
    assert resolve("38a2b1") == "cs-38a2b1"
    assert resolve("cs-38f") == "cs-38ffff"
    assert resolve("latest") == "cs-38a2b1ff"
    assert resolve("latest~2") == "cs-38a2b1"
    assert resolve("2023-06-15 15:00:07") == "cs-38a2b1"
    assert resolve("2023-06-15 16:00") == "cs-38ffff"
    assert resolve("2023-06-15") == "cs-38ffff"
    assert resolve("2024-01-01T00:00:00Z") == "cs-38a2b1ff"
    for ambiguous in ("cs-38", "38a2", "nonsense", "cs-", ""):
        with pytest.raises(UsageError):
            resolve(ambiguous)
    for missing in ("cs-000000", "latest~3", "2023-06-15 15:00:06", "1999-01-01"):
        with pytest.raises(NotFound):
            resolve(missing)


def test_resolve_times_as_options_take_them(repository: Repository) -> None:
    """Durations ago, times of today and of yesterday name snapshots; an id that begins like a duration comes first."""
    now_ns = time.time_ns()
    today = datetime.fromtimestamp(now_ns / 1e9).astimezone().replace(tzinfo=None)
    yesterday_noon = today.replace(hour=12, minute=0, second=0) - timedelta(days=1)
    hour_ns = 3600 * 10**9
    with repository.writer() as writer:
        make_snapshot(writer, "cs-aaaaa1", {}, time_ns=int(yesterday_noon.timestamp()) * 10**9)
        make_snapshot(writer, "cs-aaaaa2", {}, time_ns=now_ns - 50 * 24 * hour_ns)
        make_snapshot(writer, "cs-3daaaa", {}, time_ns=now_ns + 26 * hour_ns)
    resolve = repository.snapshots.resolve
    assert resolve("yesterday 12:00") == "cs-aaaaa1"
    assert resolve("yesterday 11:59") == "cs-aaaaa2"
    assert resolve("2d") == "cs-aaaaa2"
    assert resolve("1s") == resolve("23:59:59") == resolve("today") == "cs-aaaaa1"
    assert resolve("3d") == "cs-3daaaa"
    for missing in ("51d", "9e9", "20w"):
        with pytest.raises(NotFound):
            resolve(missing)


def test_the_order_is_that_of_commits_when_the_clock_was_ahead(repository: Repository) -> None:
    """One snapshot from a clock ahead is the newest only until the next, also without the index.

    Times name snapshots by the time that the list shows.
    """
    day_ns = 86400 * 10**9
    now_ns = time.time_ns()
    for name, time_ns in (
        ("cs-00000a", now_ns - 3),
        ("cs-00000f", now_ns + 400 * day_ns),
        ("cs-00000b", now_ns - 2),
        ("cs-00000c", now_ns - 1),
    ):
        with repository.writer() as writer:
            make_snapshot(writer, name, {}, time_ns=time_ns)
        assert repository.snapshots.ids()[0] == name
        assert next(repository.snapshots.newest_first()).id == name
    order = ["cs-00000c", "cs-00000b", "cs-00000f", "cs-00000a"]
    assert repository.snapshots.ids() == order
    os.unlink(repository.path / "index.sqlite")
    assert repository.snapshots.ids() == order
    assert [one.id for one in repository.snapshots.load_all()[0]] == order
    with repository.writer():
        pass
    assert repository.snapshots.ids() == order
    assert repository.snapshots.resolve("latest~2") == "cs-00000f"
    tomorrow, next_year = (
        datetime.fromtimestamp((now_ns + days * day_ns) / 1e9).astimezone() for days in (1, 399)
    )
    assert repository.snapshots.resolve(str(tomorrow.date())) == "cs-00000c"
    assert repository.snapshots.resolve(str(next_year.date())) == "cs-00000c"
    assert repository.snapshots.resolve(str(next_year.date() + timedelta(days=2))) == "cs-00000f"


def test_a_child_comes_after_its_parent_when_the_clock_went_back_a_little(repository: Repository) -> None:
    """A step back that is over by the time of the commit does not put a snapshot before the one it was built on."""
    with repository.writer() as writer:
        make_snapshot(writer, "cs-00000a", {}, time_ns=100)
        make_snapshot(writer, "cs-00000b", {}, time_ns=90, parent="cs-00000a")
        make_snapshot(writer, "cs-00000c", {}, time_ns=95, parent="cs-00000b")
        make_snapshot(writer, "cs-00000d", {}, time_ns=99)
    assert repository.snapshots.ids() == ["cs-00000c", "cs-00000b", "cs-00000a", "cs-00000d"]


def test_an_index_of_an_earlier_version_is_read_and_extended(repository: Repository) -> None:
    """The catalogue of an earlier ciuic lists as it is, and gets places and sets with the next snapshot."""
    with repository.writer() as writer:
        make_snapshot(writer, "cs-00000a", {}, time_ns=time.time_ns() + 10**15)
    with sqlite3.connect(repository.path / "index.sqlite") as index:
        for column in ("placed_ns", "set_id", "set_name"):
            index.execute(f"ALTER TABLE snapshots DROP COLUMN {column}")
    index.close()
    assert repository.snapshots.ids() == ["cs-00000a"]
    assert [info.id for info in repository.snapshots.newest_known()] == ["cs-00000a"]
    with repository.writer() as writer:
        make_snapshot(writer, "cs-00000b", {}, time_ns=time.time_ns())
    assert repository.snapshots.ids() == ["cs-00000b", "cs-00000a"]
    assert repository.check_index() == []


def test_new_ids_grow_when_they_collide() -> None:
    """New ids have six digits while a free one is found quickly, and more after collisions."""
    digits = iter(["aaaaaa"] * 4 + ["bbbbbbbb"])
    assert new_snapshot_id({"cs-aaaaaa"}, random_hex=lambda _: next(digits)) == "cs-bbbbbbbb"


@given(st.integers(0, 3 << 20), st.one_of(st.none(), st.integers(0, 3 << 20)))
def test_is_zero_sees_a_single_byte(length: int, at: int | None) -> None:
    """A buffer of zeros is zero at any length, and one other byte anywhere makes it not zero."""
    data = bytearray(length)
    if at is not None and at < length:
        data[at] = 1
    assert is_zero(data) == (at is None or at >= length)


def test_collection_frees_unreferenced_content(repository: Repository) -> None:
    """Rewriting with the marked set keeps snapshots readable, also by an open reader, and drops the rest."""
    with repository.writer(pack_bytes=50_000) as writer:
        make_snapshot(writer, "cs-000001", {b"a": content(2, 30), b"b": content(4, 5)})
        make_snapshot(writer, "cs-000002", {b"b": content(4, 5), b"t": content(3, 5)})
    before = repository.stored_bytes()
    with Repository.open(repository.path) as reader:
        assert read_files(reader, "cs-000002")
        with repository.writer() as writer:
            writer.remove_snapshots([SnapshotId("cs-000001")])
            snapshot = repository.snapshots.load(SnapshotId("cs-000002"))
            live = {reached.id for reached in Walker(repository).walk(snapshot)}
            freed = sum(writer.rewrite_pack(pack.number, live) for pack in repository.packs())
        assert before - repository.stored_bytes() == freed > 25 * BLOCK
        assert read_files(reader, "cs-000002") == {b"b": content(4, 5), b"t": content(3, 5)}
    assert repository.check_index() == []
    assert list(repository.scrub()) == []


def test_listing_imports_neither_hashing_nor_compression(repository: Repository) -> None:
    """Listing from the catalogue imports neither hashing nor compression."""
    with repository.writer() as writer:
        make_snapshot(writer, "cs-000001", {})
    code = (
        "import sys; from ciuic.repository import Repository\n"
        "print([str(i.id) for i in Repository.open(sys.argv[1]).snapshots.list()])\n"
        "print(sorted({'xxhash', 'zstandard', 'structlog'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(repository.path)]
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    ).stdout
    assert out == "['cs-000001']\n[]\n"


def test_walker_with_on_damage_continues_past_damage(repository: Repository) -> None:
    """A walk with on_damage reports the unreadable node and reaches everything else, each chunk once."""
    with repository.writer() as writer:
        make_snapshot(writer, "cs-000001", {b"a": content(2, 3), b"b": content(4, 3)})
    snapshot = repository.snapshots.load(SnapshotId("cs-000001"))
    reached = list(Walker(repository).walk(snapshot))
    assert len({item.id for item in reached}) == len(reached)
    kinds = [item.kind for item in reached]
    # Where a tree is cut depends on the repository's seed: two entries may lie in one node, or in two below one of the next level,
    # whose two entries may be cut as well.
    assert (kinds.count("map"), kinds.count("data"), kinds.count("tree") % 2) == (2, 6, 1)
    assert {item.entry.name for item in reached if item.kind == "data" and item.entry} == {b"a", b"b"}
    victim = next(item for item in reached if item.kind == "map" and item.entry and item.entry.name == b"a")
    flip_stored(repository, victim.id)
    damaged: list[ChunkId] = []
    with Repository.open(repository.path) as reader:
        rest = list(Walker(reader).walk(snapshot, on_damage=lambda item, _: damaged.append(item.id)))
    assert damaged == [victim.id]
    assert len(rest) == len(reached) - 3

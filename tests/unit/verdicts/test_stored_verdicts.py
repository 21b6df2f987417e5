"""Records of verdicts: made once, shown at once, and believed only if they were made here."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpoint_files import FORMATS, plain_safetensors
from support.cli_repository import FIRST_NS, CliRepository, directory, store_tree

from ciuic.daemon.base.events import Alerts, EventBus, Wakeup
from ciuic.daemon.base.settings import RootSettings, Settings
from ciuic.daemon.housekeeping import DaemonHousekeeping
from ciuic.daemon.verdicts import GoodCheckpoints, Verdicts
from ciuic.errors import Damaged
from ciuic.history import checkpoints, judge_snapshot, last_good, timelines
from ciuic.repository import Repository
from ciuic.types import RootRecord, Snapshot, SnapshotDraft, SnapshotId
from ciuic.verdicts import records as records_module
from ciuic.verdicts import verdict as verdict_module
from ciuic.verdicts.records import KEY_VARIABLE, VerdictRecord, VerdictRecords, encode_record, own_key
from ciuic.verdicts.sources import SnapshotFile
from ciuic.verdicts.verdict import FileVerdicts

WEIGHTS = FORMATS["safetensors"].make(random.Random(1))
TORN = WEIGHTS[:-5]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRepository:
    """Make two snapshots: the newest checkpoint of the first is GOOD, that of the second TORN."""
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "state" / "key"))
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"a.safetensors": WEIGHTS}, mode="tracked")
    made.snapshot(
        {b"a.safetensors": WEIGHTS, b"b.safetensors": (TORN, {"mtime_ns": 2 * 10**18})}, mode="tracked"
    )
    return made


def judged(made: CliRepository, good: GoodCheckpoints) -> None:
    """Run the daemon's part on the repository until it has nothing left to do."""
    root = RootSettings(str(made.root), last_good_within_seconds=3600)
    settings = Settings(
        socket=made.path / "c", runtime_dir=made.path.parent, repository=made.path, roots=(root,)
    )
    verdicts = Verdicts(lambda: settings, Wakeup(), cwd=made.path.parent, good=good)
    while trio.run(verdicts.once):
        pass


def test_the_last_good_checkpoint_grows_old(made: CliRepository) -> None:
    """A torn newer one is no good one; the alert comes with the limit, at any clock, and ends with the next GOOD one."""
    hour_ns = 3600 * 10**9
    clock = SimpleNamespace(boot_ns=50 * hour_ns, now_ns=2 * 10**18)
    good = GoodCheckpoints(lambda: clock.now_ns, lambda: clock.boot_ns)
    alerts = Alerts(EventBus(lambda: clock.now_ns), lambda: clock.now_ns)
    roots = [RootSettings(str(made.root), last_good_within_seconds=3600)]
    parts: Any = SimpleNamespace(
        alerts=alerts,
        settings=SimpleNamespace(roots=roots),
        good_checkpoints=good,
        now_ns=lambda: clock.now_ns,
    )
    housekeeping = DaemonHousekeeping(parts)

    def standing() -> list[str]:
        housekeeping._look_at_checkpoints()
        return [alert.message for alert in alerts.standing()]

    assert (good.seconds(str(made.root)), standing()) == (None, [])
    clock.boot_ns += 2 * hour_ns
    assert standing() == [f"no checkpoint of {made.root} was GOOD for 1h00m"]
    judged(made, good)
    first = good.seconds(str(made.root))
    assert first is not None
    text = f"the newest GOOD checkpoint of {made.root}, {made.root}/a.safetensors, is older than 1h00m"
    assert standing() == [text]
    clock.now_ns -= 500 * hour_ns
    clock.boot_ns += hour_ns
    judged(made, good)
    assert good.seconds(str(made.root)) == first + 3600
    fresh = {b"c.safetensors": (WEIGHTS, {"mtime_ns": clock.now_ns - hour_ns // 2})}
    made.snapshot(fresh, mode="tracked", time_ns=clock.now_ns)
    judged(made, good)
    assert (good.seconds(str(made.root)), standing()) == (1800, [])
    clock.boot_ns += hour_ns
    assert len(standing()) == 1
    roots.clear()
    assert standing() == []


def judge_all(made: CliRepository) -> int:
    """Run the daemon's part on the repository, and return how many snapshots it judged."""
    settings = Settings(socket=made.path / "c", runtime_dir=made.path.parent, repository=made.path)
    return trio.run(Verdicts(lambda: settings, Wakeup(), cwd=made.path.parent).once)


def states(made: CliRepository, config: str = os.devnull) -> list[str | None]:
    listed = json.loads(made.run("list", "--json", env={"CIUIC_CONFIG": config}).stdout)["snapshots"]
    return [one["checkpoint"] and one["checkpoint"]["verdict"] for one in listed]


def test_the_daemon_stores_what_list_and_checkpoints_show(
    made: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every snapshot is judged once, in a process of its own; afterwards nothing of a checkpoint is read."""
    assert states(made) == [None, None]
    before = made.run("checkpoints", "--json").stdout
    assert (judge_all(made), judge_all(made)) == (2, 0)
    assert states(made) == ["TORN", "GOOD"]
    lines = made.run("list").stdout.splitlines()
    assert ["CHECKPOINT" in lines[0], "TORN" in lines[1], "GOOD" in lines[2]] == [True] * 3
    monkeypatch.setattr(verdict_module, "judge_file", None)
    assert made.run("checkpoints", "--json").stdout == before


def test_numbers_that_are_not_finite_are_stored(made: CliRepository) -> None:
    """The daemon counts them while it judges; `list` and its document show the mark beside the state."""
    odd = plain_safetensors({"w": np.array([1, np.nan, np.inf], "f4")})
    made.snapshot({b"c.safetensors": (odd, {"mtime_ns": 3 * 10**18})}, mode="tracked")
    assert judge_all(made) == 3
    assert "GOOD, 2 not finite" in made.run("list").stdout
    listed = json.loads(made.run("list", "--json").stdout)["snapshots"]
    assert [one["checkpoint"]["not_finite"] for one in listed] == [2, None, 0]


def test_changed_patterns_remake_the_records(made: CliRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured pattern names one checkpoint for the daemon, `list`, `checkpoints` and `restore`; a reload judges all anew."""
    part = {b"x.safetensors": (WEIGHTS, {"mtime_ns": 3 * 10**18})}
    whole = {b"best": {b"x": part, b"y": part}, b"kept": {b"x": part}}
    made.snapshot(whole, mode="tracked", time_ns=4 * 10**18)
    config = made.path.parent / "ciuic.toml"
    base = f'[repository]\npath = "{made.path}"\n'
    config.write_text(base)
    settings = Settings(socket=made.path / "c", runtime_dir=made.path.parent, repository=made.path)
    good = GoodCheckpoints(lambda: 4 * 10**18)
    verdicts = Verdicts(lambda: settings, Wakeup(), cwd=made.path.parent, good=good)

    def paths() -> set[str]:
        env = {"CIUIC_CONFIG": str(config)}
        found = json.loads(made.run("checkpoints", "--json", env=env).stdout)["checkpoints"]
        return {os.path.relpath(one["path"], made.root) for one in found}

    assert [trio.run(verdicts.once), trio.run(verdicts.once)] == [3, 0]
    assert paths() == {"best/x/x.safetensors", "best/y/x.safetensors", "kept/x/x.safetensors"}
    config.write_text(f'{base}[[checkpoints]]\npath = "{made.root}/best/"\n')
    assert states(made, str(config)) == [None, None, None]
    assert paths() == {"best", "kept/x/x.safetensors"}
    pattern = f"{made.root}/best/"
    settings = settings._replace(checkpoint_patterns=(pattern,))
    assert [trio.run(verdicts.once), trio.run(verdicts.once)] == [3, 0]
    assert states(made, str(config)) == ["GOOD", "TORN", "GOOD"]
    with monkeypatch.context() as known:
        known.setattr(verdict_module, "judge_file", None)
        assert paths() == {"best", "kept/x/x.safetensors"}
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        (timeline,) = timelines(snapshots)
        best = os.fsencode(made.root) + b"/best"
        chosen = last_good([(repository, timeline)], best, patterns=(pattern,))
        assert chosen.checkpoint.checkpoint.path == best
        # Below it there are parts alone.
        inner = list(checkpoints(repository, timeline, path=best + b"/x", patterns=(pattern,)))
        assert [one.checkpoint.path for one in inner] == [best + b"/x/x.safetensors"]


def test_a_repository_that_is_being_written_is_judged(made: CliRepository) -> None:
    """The process can open nothing to write, and reads the index beside a writer all the same."""
    with Repository.open(made.path) as repository, repository.writer() as writer:
        writer.put_chunk(b"another chunk")
        assert judge_all(made) == 2
        assert states(made) == ["TORN", "GOOD"]
    other = FORMATS["safetensors"].make(random.Random(2))
    reader = sqlite3.connect(f"file:{made.path}/index.sqlite?mode=ro", uri=True)
    try:
        # While somebody reads, what a writer adds stays in the write-ahead log.
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM packs LIMIT 1").fetchone()
        made.snapshot({b"z.safetensors": other}, mode="tracked")
        assert (made.path / "index.sqlite-wal").stat().st_size
        assert judge_all(made) == 1
    finally:
        reader.close()
    assert states(made) == ["GOOD", "TORN", "GOOD"]


def test_a_content_is_read_once(made: CliRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file in the next snapshot is not read again; with an open writer, or another name, it is."""
    read = []
    judge = verdict_module.judge_file

    def counted(source, **options):  # type: ignore[no-untyped-def]
        read.append(source.name)
        return judge(source, **options)

    monkeypatch.setattr(verdict_module, "judge_file", counted)
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        known = FileVerdicts()
        for snapshot in snapshots:
            judge_snapshot(repository, snapshots, snapshot, known)
    assert read == [b"a.safetensors", b"b.safetensors"]
    made.snapshot({b"a.safetensors": (WEIGHTS, {"flags": 1}), b"c.safetensors": WEIGHTS}, mode="tracked")
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        record = judge_snapshot(repository, snapshots, snapshots[0], known)
    assert read[2:] == [b"a.safetensors", b"c.safetensors"]
    ((_, found),) = record.roots
    assert [one.checkpoint.verdict.state for one in found] == ["UNKNOWN", "GOOD"]


def planted(made: CliRepository, key: bytes) -> bytes:
    """Return a record that calls the torn checkpoint of the second snapshot GOOD."""
    path = made.path / "verdicts" / "cs-000002"
    record = msgspec.json.decode(path.read_bytes().split(b"\n")[0], type=VerdictRecord)
    body = msgspec.json.encode(record).replace(b"TORN", b"GOOD")
    return encode_record(msgspec.json.decode(body, type=VerdictRecord), key)


@pytest.mark.parametrize("how", ["planted", "flipped", "empty", "renamed", "rules", "key", "open key"])
def test_a_record_that_was_not_made_here_is_none(
    made: CliRepository, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Planted, damaged, misplaced and outdated records are none, and the snapshot is judged anew."""
    judge_all(made)
    path = made.path / "verdicts" / "cs-000002"
    key_path = Path(os.environ[KEY_VARIABLE])
    data = path.read_bytes()
    if how == "planted":
        path.write_bytes(planted(made, b"k" * 32))
    elif how == "flipped":
        path.write_bytes(data.replace(b"TORN", b"GOOD"))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "renamed":
        path.write_bytes((made.path / "verdicts" / "cs-000001").read_bytes())
    elif how == "rules":
        monkeypatch.setattr(records_module, "RULES", records_module.RULES + 1)
    elif how == "key":
        key_path.unlink()
    else:
        key_path.chmod(0o644)
    assert states(made)[0] is None
    found = json.loads(made.run("checkpoints", "--json").stdout)["checkpoints"]
    assert {os.path.basename(one["path"]): one["verdict"] for one in found}["b.safetensors"] == "TORN"
    if how in ("planted", "flipped", "empty", "renamed"):
        assert judge_all(made) == 1
        assert states(made) == ["TORN", "GOOD"]


def test_a_lie_of_this_host_restores_nothing_torn(made: CliRepository) -> None:
    """What --last-good chooses is judged anew, also where the record counts."""
    judge_all(made)
    (made.path / "verdicts" / "cs-000002").write_bytes(planted(made, own_key()))
    assert states(made)[0] == "GOOD"
    result = made.run("restore", "--last-good", "-p", str(made.root), "--dry-run")
    assert "cs-000001" in result.stderr, result.output


def test_a_record_speaks_of_its_snapshot_alone(made: CliRepository) -> None:
    """A snapshot of the same id with other trees is judged by itself; verdicts on what is gone are removed."""
    judge_all(made)
    with Repository.open(made.path) as repository:
        record = VerdictRecords(repository).record(repository.snapshots.load(SnapshotId("cs-000002")))
        assert record is not None
        with repository.writer() as writer:
            writer.remove_snapshots([SnapshotId("cs-000002")])
    made.snapshot({b"a.safetensors": TORN}, id_="cs-000002", mode="tracked")
    with Repository.open(made.path) as repository:
        assert VerdictRecords(repository).record(repository.snapshots.load(SnapshotId("cs-000002"))) is None
        with repository.writer() as writer:
            writer.remove_snapshots([SnapshotId("cs-000002")])
    judge_all(made)
    assert os.listdir(made.path / "verdicts") == ["cs-000001"]


def test_no_record_counts_in_the_repository_of_another_user(made: CliRepository) -> None:
    """Root believes nothing of a repository that another user may write to, and stores nothing there."""
    judge_all(made)
    os.chown(made.path, 54321, 54321)
    (made.path / "verdicts" / "cs-000001").unlink()
    assert states(made) == [None, None]
    assert judge_all(made) == 0
    assert os.listdir(made.path / "verdicts") == ["cs-000002"]


def test_what_could_not_be_read_is_looked_at_again(
    made: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record says so, `list` shows UNKNOWN, and `checkpoints` judges anew."""

    def unreadable(*arguments: object) -> bytes:
        raise Damaged("a pack is gone")

    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        with monkeypatch.context() as damaged:
            damaged.setattr(SnapshotFile, "read", unreadable)
            record = judge_snapshot(repository, snapshots, snapshots[1], FileVerdicts())
        assert (record.is_complete, record.files) == (False, {})
        VerdictRecords(repository, own_key()).write(record)
    assert states(made) == [None, "UNKNOWN"]
    found = json.loads(made.run("checkpoints", "cs-000001", "--json").stdout)["checkpoints"]
    assert [one["verdict"] for one in found] == ["GOOD"]


def test_a_snapshot_of_nothing_starts_no_process(made: CliRepository) -> None:
    """It has the verdicts of the one before, which lies behind one of another directory; one that cannot tell open files has its own."""
    judge_all(made)
    settings = Settings(socket=made.path / "c", runtime_dir=made.path.parent, repository=made.path)
    verdicts = Verdicts(lambda: settings, Wakeup(), cwd=made.path.parent, command=["/bin/false"])
    same = {b"a.safetensors": WEIGHTS, b"b.safetensors": (TORN, {"mtime_ns": 2 * 10**18})}
    made.snapshot(same, mode="tracked")
    with Repository.open(made.path) as repository, repository.writer() as writer:
        # The same path on another host.
        other = RootRecord(path=os.fsencode(made.root), entry=directory(b"", writer.update_tree(b"", {})))
        writer.commit(SnapshotDraft(id=SnapshotId("cs-eeeeee"), time_ns=3 * 10**18, host="h", roots=(other,)))
    made.count += 1
    made.snapshot(same, mode="tracked", time_ns=4 * 10**18)
    assert (trio.run(verdicts.once), trio.run(verdicts.once)) == (3, 0)
    assert states(made) == ["TORN", None, "TORN", "TORN", "GOOD"]
    made.snapshot(same, mode="offline", time_ns=5 * 10**18)
    assert trio.run(verdicts.once) == 1
    made.snapshot(same, mode="tracked", time_ns=6 * 10**18)
    (made.path / "snapshots" / "cs-000006").write_bytes(b"damaged")
    assert trio.run(verdicts.once) == 1


def test_a_root_with_a_snapshot_between_is_judged_anew(made: CliRepository) -> None:
    """Two roots are the same in both, and one of them had another content between: of that a part may be left."""
    with Repository.open(made.path) as repository, repository.writer() as writer:
        ids = [f"cs-{number:06x}" for number in range(10, 13)]
        for number, (id_, names) in enumerate(zip(ids, (b"pq", b"q", b"pq"), strict=True)):
            content = WEIGHTS if len(names) == 2 else bytes(len(WEIGHTS))
            file = (content, {"ino": 7, "ctime_ns": 9 * 10**18})
            below = store_tree(writer, repository.block_size, {b"a.safetensors": file})
            roots = tuple(
                RootRecord(path=b"/%c" % name, entry=directory(b"", below), mode="tracked") for name in names
            )
            writer.commit(
                SnapshotDraft(id=SnapshotId(id_), time_ns=(3 + number) * 10**18, host="h", roots=roots)
            )
    judge_all(made)
    with Repository.open(made.path) as repository:
        records_of = VerdictRecords(repository)
    before, after = (records_of._read(ids[at], VerdictRecord) for at in (0, 2))
    assert before is not None
    assert after is not None
    verdicts = [[one[0].checkpoint.verdict.state for _, one in record.roots] for record in (before, after)]
    assert verdicts == [["GOOD", "GOOD"], ["GOOD", "UNKNOWN"]]
    os.unlink(made.path / "verdicts" / ids[2])
    assert judge_all(made) == 1
    again = records_of._read(ids[2], VerdictRecord)
    assert again is not None
    assert again.roots == after.roots


def test_a_process_that_dies_is_not_started_for_ever(made: CliRepository) -> None:
    """A snapshot on which the process dies stays without verdicts, and the next one has its turn."""
    settings = Settings(socket=made.path / "c", runtime_dir=made.path.parent, repository=made.path)
    verdicts = Verdicts(lambda: settings, Wakeup(), cwd=made.path.parent, command=["/bin/false"])
    assert [trio.run(verdicts.once), trio.run(verdicts.once)] == [2, 0]


SHARD = FORMATS["safetensors"].make(random.Random(2))
INDEX_NAME = b"m.safetensors.index.json"
INDEX = json.dumps({"weight_map": {"a": "sub/a.safetensors", "b": "b.safetensors"}}).encode()
CONTENTS: dict[str, Any] = {
    "good": WEIGHTS,
    "torn": TORN,
    "shard": SHARD,
    "index": INDEX,
    "tag sub": b"sub",
    "tag x": b"x",
    "none": b"",
    "open": (WEIGHTS, {"flags": 1}),
    "one": (WEIGHTS, {"ino": 7, "ctime_ns": 2 * 10**18}),
    "over one": (WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1]), {"ino": 7, "ctime_ns": 2 * 10**18}),
}
_files = st.dictionaries(
    st.sampled_from(
        [b"a.safetensors", b"b.safetensors", b"log", INDEX_NAME, b"x.index", b"x.data-00000-of-00001"]
    ),
    st.sampled_from(sorted(CONTENTS)),
    max_size=3,
) | st.fixed_dictionaries({b"latest": st.sampled_from(["tag sub", "tag x"])})
_trees = st.recursive(
    _files,
    lambda below: st.builds(
        lambda files, directories: {**files, **directories},
        _files,
        st.dictionaries(st.sampled_from([b"sub", b"step-1", b"x", b"x.pt"]), below, max_size=2),
    ),
    max_leaves=4,
)


def filled(tree: dict[bytes, Any]) -> dict[bytes, Any]:
    return {name: filled(what) if isinstance(what, dict) else CONTENTS[what] for name, what in tree.items()}


@given(
    trees=st.lists(_trees, min_size=2, max_size=4),
    order=st.integers(0, 23),
    hours=st.lists(st.integers(-3, 9), min_size=4, max_size=4),
)
@example([{b"latest": "tag sub", b"sub": {b"a.safetensors": "good"}}, {b"latest": "tag x"}], 0, [0, 1, 2, 3])
# Named as the directory beside it.
@example(
    [{b"x": {b"log": "torn"}, b"x.data-00000-of-00001": "torn", b"x.index": "none"}, {b"x.index": "torn"}],
    0,
    [0, 1, 2, 3],
)
# An older version is committed late.
@example(
    [{b"a.safetensors": "over one"}, {b"a.safetensors": "one"}, {b"a.safetensors": "over one"}],
    1,
    [1, 0, 2, 3],
)
# The clock was set back.
@example([{b"a.safetensors": "one"}, {b"a.safetensors": "over one"}, {b"log": "torn"}], 1, [0, -2, 3, 4])
def test_what_has_not_changed_keeps_its_verdicts(
    tmp_path_factory: pytest.TempPathFactory, trees: list[dict[bytes, Any]], order: int, hours: list[int]
) -> None:
    """Judged from the record of a neighbour, a snapshot has the verdicts that it has when all of it is read.

    Each is judged when it and what was committed before it is there, or all are, in any order.
    """
    top = tmp_path_factory.mktemp("carried")
    made = CliRepository(top / "repo", top / "root")
    known: dict[str, VerdictRecord] = {}

    def judge(repository: Repository, snapshots: list[Snapshot], snapshot: Snapshot) -> None:
        record = judge_snapshot(
            repository, snapshots, snapshot, FileVerdicts(), lambda one: known.get(one.id)
        )
        whole = judge_snapshot(repository, snapshots, snapshot, FileVerdicts())
        known[snapshot.id] = msgspec.structs.replace(record, files={})
        assert known[snapshot.id] == msgspec.structs.replace(whole, files={})

    parent = ""
    for number, tree in enumerate(trees):
        # Most of the next one is what the one before has.
        time_ns = FIRST_NS + hours[number] * 3600 * 10**9
        parent = made.snapshot(
            filled(trees[number - 1] | tree if number else tree),
            mode="tracked",
            time_ns=time_ns,
            parent=parent,
        )
        if order % 2:
            with Repository.open(made.path) as repository:
                snapshots, _ = repository.snapshots.load_all()
                judge(repository, snapshots, next(one for one in snapshots if one.id == parent))
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        for snapshot in random.Random(order).sample(snapshots, len(snapshots)):
            judge(repository, snapshots, snapshot)


def test_what_could_not_be_judged_once_is_judged_again(
    made: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that had no memory says nothing of the next snapshot."""

    def fails(*arguments: object) -> None:
        raise MemoryError

    made.snapshot({b"a.safetensors": WEIGHTS}, mode="tracked")
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        with monkeypatch.context() as short:
            short.setattr(verdict_module, "_read_structure", fails)
            record = judge_snapshot(repository, snapshots, snapshots[1], FileVerdicts())
        # What else is in that snapshot is shown as it is.
        assert record.is_complete
        later = judge_snapshot(repository, snapshots, snapshots[0], FileVerdicts(), lambda _: record)
    assert later.newest is not None
    assert later.newest.checkpoint.verdict.is_good


def test_verdicts_of_an_unchanged_directory_are_still_known_later(
    made: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that was not looked at for a while: its old files are not read again when a new one comes."""
    read = []
    judge = verdict_module.judge_file
    monkeypatch.setattr(
        verdict_module,
        "judge_file",
        lambda source, **options: read.append(source.name) or judge(source, **options),
    )
    old = {b"%d.safetensors" % number: WEIGHTS for number in range(3)}
    # As the two that are there, all in one directory, so that each later one has a neighbour.
    records: dict[str, VerdictRecord] = {}
    for tree in (
        {b"d": old},
        {b"d": old, b"log": b"1"},
        {b"d": old | {b"3.safetensors": SHARD}, b"log": b"2"},
    ):
        made.snapshot(tree, mode="tracked")
        with Repository.open(made.path) as repository:
            snapshots, _ = repository.snapshots.load_all()
            known = FileVerdicts(lambda: [one.files for one in records.values()])
            record = judge_snapshot(
                repository, snapshots, snapshots[0], known, lambda one: records.get(one.id)
            )
            records[record.snapshot] = record
    assert read == [*sorted(old), b"3.safetensors"]

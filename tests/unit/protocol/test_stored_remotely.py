"""Tests of the record of what a remote has stored: written whole, read as if its writer were hostile."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.protocol.stored_remotely import (
    DEFAULT_STATE_DIR,
    MAX_RECORD_BYTES,
    MAX_UNSEEN_SECONDS,
    RemotePlace,
    RemotesDone,
    StoredRecord,
    StoredRecordDamaged,
    decode_record,
    doubt_record,
    encode_record,
    is_doubted,
    read_record,
    remote_lag,
    remotes_done,
    upload_state_dir,
    write_record,
)

REPOSITORY = "ab" * 16
NOW_NS = 1_760_000_000 * 10**9
NAS = RemotePlace("nas", "file:///mnt/nas")
RECORD = StoredRecord(
    repository=REPOSITORY,
    stored=frozenset({"cs-000001", "cs-000002"}),
    passed_over=frozenset({"cs-000003"}),
    tail_ns=5,
    seen_ns=NOW_NS,
)


def _places(*names: str) -> list[RemotePlace]:
    return [RemotePlace(name, "file:///mnt/nas") for name in names]


ids = st.frozensets(st.from_regex(r"cs-[0-9a-f]{6}", fullmatch=True), max_size=20)


@given(stored=ids, passed_over=ids, tail_ns=st.integers(0, 1 << 62))
def test_a_record_reads_back(stored: frozenset[str], passed_over: frozenset[str], tail_ns: int) -> None:
    """A record is read as it was written, and equal records are equal bytes."""
    record = StoredRecord(repository=REPOSITORY, stored=stored, passed_over=passed_over, tail_ns=tail_ns)
    assert decode_record(encode_record(record)) == record
    assert encode_record(decode_record(encode_record(record))) == encode_record(record)


def test_the_writer_replaces_the_record_for_all_to_read(tmp_path: Path) -> None:
    """The record is replaced, with mode 0644 whatever the umask, and leaves no other file."""
    (tmp_path / "nas").mkdir()
    (tmp_path / "nas" / "stored.tmp").write_text("left by a killed process")
    umask = os.umask(0o077)
    try:
        write_record("nas", StoredRecord(repository=REPOSITORY), tmp_path)
        write_record("nas", RECORD, tmp_path)
    finally:
        os.umask(umask)
    assert read_record("nas", tmp_path) == RECORD
    assert os.listdir(tmp_path / "nas") == ["stored"]
    assert stat.S_IMODE((tmp_path / "nas" / "stored").stat().st_mode) == 0o644


def test_the_environment_names_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIUIC_UPLOAD_STATE is where both sides look, in place of the service's directory."""
    assert upload_state_dir({}) == DEFAULT_STATE_DIR
    monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(tmp_path))
    write_record("nas", RECORD)
    assert read_record("nas") == RECORD


def test_what_remotes_need_no_more(tmp_path: Path) -> None:
    """Stored and passed over counts as done; a missing record, one of another repository, or an empty one is None."""
    write_record("good", RECORD, tmp_path)
    write_record("empty", StoredRecord(repository=REPOSITORY), tmp_path)
    write_record("other", StoredRecord(repository="cd" * 16, stored=RECORD.stored, tail_ns=9), tmp_path)
    # It stored something once, and nothing of that is left on the host.
    write_record("stalled", StoredRecord(repository=REPOSITORY, tail_ns=9), tmp_path)
    names = ("good", "empty", "other", "stalled", "missing")
    assert remotes_done(_places(*names), REPOSITORY, now_ns=NOW_NS, state_dir=tmp_path) == RemotesDone(
        {
            "good": {"cs-000001", "cs-000002", "cs-000003"},
            "empty": None,
            "other": None,
            "stalled": frozenset(),
            "missing": None,
        },
        [],
    )


@given(stored=ids, passed_over=ids, tail_ns=st.integers(0, 1 << 62))
def test_a_doubted_remote_has_nothing_for_anybody(
    stored: frozenset[str], passed_over: frozenset[str], tail_ns: int
) -> None:
    """Retention and lag count nothing as stored after a doubt, and say why, until the record is written again."""
    record = StoredRecord(
        repository=REPOSITORY, stored=stored, passed_over=passed_over, tail_ns=tail_ns, seen_ns=NOW_NS
    )
    with TemporaryDirectory() as name:
        place = Path(name)
        write_record("nas", record, place)
        doubt_record(NAS, REPOSITORY, "it went back", place)
        found = remotes_done(_places("nas"), REPOSITORY, now_ns=NOW_NS, state_dir=place)
        assert found.done == {"nas": frozenset()}
        assert [flaw.endswith("it went back") for flaw in found.flaws] == [True]
        lag = remote_lag(NAS, REPOSITORY, [], now_ns=0, state_dir=place)
        assert (lag.stored, lag.flaw.endswith("it went back")) == (0, True)
        known = read_record("nas", place)
        assert known is not None
        assert (known.stored, known.passed_over, known.tail_ns) == (frozenset(), frozenset(), tail_ns)
        write_record("nas", record, place)
        assert remotes_done(_places("nas"), REPOSITORY, now_ns=NOW_NS, state_dir=place).flaws == []


@given(
    seconds=st.integers(-3 * MAX_UNSEEN_SECONDS, 3 * MAX_UNSEEN_SECONDS),
    look=st.sampled_from([None, "", "it is away"]),
)
def test_what_was_not_seen_lately_lets_nothing_go(seconds: int, look: str | None) -> None:
    """A look of this run decides; without one, a record that no clock calls older than a quarter of an hour."""
    with TemporaryDirectory() as name:
        write_record("nas", RECORD, Path(name))
        looks = {} if look is None else {"nas": look}
        now_ns = NOW_NS + seconds * 10**9
        found = remotes_done(_places("nas"), REPOSITORY, now_ns=now_ns, looks=looks, state_dir=Path(name))
        trusted = abs(seconds) <= MAX_UNSEEN_SECONDS if look is None else not look
        assert found.done == {"nas": RECORD.stored | RECORD.passed_over if trusted else frozenset()}
        assert len(found.flaws) == (not trusted)


def test_another_url_is_another_remote(tmp_path: Path) -> None:
    """A remote with a new URL has no known snapshots, and the old record permits no removal."""
    record = msgspec.structs.replace(RECORD, url="s3://bucket/old")
    write_record("nas", record, tmp_path)
    for url, is_known in (("s3://bucket/old", True), ("s3://bucket/new", False)):
        place = RemotePlace("nas", url)
        done = remotes_done([place], REPOSITORY, now_ns=NOW_NS, state_dir=tmp_path).done["nas"]
        assert done == (RECORD.stored | RECORD.passed_over if is_known else None)
        lag = remote_lag(place, REPOSITORY, [], now_ns=NOW_NS, state_dir=tmp_path)
        assert ("s3://bucket/old" in lag.flaw, is_doubted(place, tmp_path)) == (not is_known, not is_known)
    doubt_record(RemotePlace("nas", "s3://bucket/new"), REPOSITORY, "it went back", tmp_path)
    assert read_record("nas", tmp_path) == record


def test_nothing_is_doubted_where_nothing_was_stored(tmp_path: Path) -> None:
    """A remote without a record of the repository gets none by a doubt."""
    doubt_record(NAS, REPOSITORY, "it went back", tmp_path)
    assert read_record("nas", tmp_path) is None
    write_record("nas", RECORD, tmp_path)
    doubt_record(NAS, "cd" * 16, "it went back", tmp_path)
    assert read_record("nas", tmp_path) == RECORD


def test_remotes_of_another_configuration_count_where_they_have_a_record(tmp_path: Path) -> None:
    """A repository that the configuration does not name is kept for the remotes that have a record of it alone."""
    write_record("good", RECORD, tmp_path)
    write_record("bad", RECORD, tmp_path)
    (tmp_path / "bad" / "stored").write_text("{")
    found = remotes_done(
        _places("good", "bad", "missing"), REPOSITORY, is_theirs=False, now_ns=NOW_NS, state_dir=tmp_path
    )
    assert found == RemotesDone({"good": RECORD.stored | RECORD.passed_over}, [])
    assert (
        remotes_done(_places("good"), "cd" * 16, is_theirs=False, now_ns=NOW_NS, state_dir=tmp_path).done
        == {}
    )


def _link_to_a_record(place: Path) -> None:
    place.parent.joinpath("elsewhere").write_bytes(encode_record(RECORD))
    place.joinpath("stored").symlink_to("../elsewhere")


def _link_for_a_directory(place: Path) -> None:
    place.rmdir()
    real = place.parent / "real"
    real.mkdir()
    real.joinpath("stored").write_bytes(encode_record(RECORD))
    place.symlink_to("real")


def _written(content: bytes) -> Any:
    return lambda place: place.joinpath("stored").write_bytes(content)


HOSTILE = {
    "a link": _link_to_a_record,
    "a link for its directory": _link_for_a_directory,
    "a pipe": lambda place: os.mkfifo(place / "stored"),
    "a directory": lambda place: place.joinpath("stored").mkdir(),
    "a device": lambda place: place.joinpath("stored").symlink_to("/dev/zero"),
    "nothing in it": _written(b""),
    "no JSON": _written(b"stored"),
    "no UTF-8": _written(b'{"repository":"\xff"}'),
    "a list": _written(b"[]"),
    "ids that are numbers": _written(b'{"repository":"a","stored":[1]}'),
    "a negative time": _written(b'{"repository":"a","tail_ns":-1}'),
    "a time without end": _written(b'{"repository":"a","tail_ns":' + b"9" * 5000 + b"}"),
    "no repository": _written(b'{"stored":[]}'),
    "depth": _written(b'{"x":' + b"[" * 100_000),
    "size": _written(b'{"repository":"a","stored":[]' + b" " * MAX_RECORD_BYTES + b"}"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_record_lets_nothing_go(tmp_path: Path, what: str) -> None:
    """A record that is a link, no file, too large or no record is refused in words, and its remote needs everything."""
    place = tmp_path / "nas"
    place.mkdir()
    HOSTILE[what](place)
    with pytest.raises(StoredRecordDamaged):
        read_record("nas", tmp_path)
    found = remotes_done([NAS], REPOSITORY, now_ns=NOW_NS, state_dir=tmp_path)
    assert found.done == {"nas": frozenset()}
    assert "remote nas" in found.flaws[0]


def test_the_state_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    """The state directory may be a link of root's, as systemd makes one for a service with a user of its own."""
    (tmp_path / "private").mkdir()
    (tmp_path / "ciuic-upload").symlink_to("private")
    write_record("nas", RECORD, tmp_path / "ciuic-upload")
    assert read_record("nas", tmp_path / "ciuic-upload") == RECORD

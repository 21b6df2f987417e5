"""Tests of log entries, rounds and manifests: round trips, and what a hostile bucket can put in their place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import remote_recipe as recipe

from ciuic.remote import documents, object_names
from ciuic.remote.documents import (
    LiveManifest,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogRemove,
    LogRetired,
    LogState,
    RemoteManifest,
    StoredRound,
    decode_log_entry,
    decode_manifest,
    decode_round,
    encode_log_entry,
    encode_manifest,
    encode_round,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.sealing.sealer import MasterKey, Sealer

SEALER = Sealer(recipe.REMOTE_ID, MasterKey(recipe.MASTER))
CLEAR = Sealer(recipe.REMOTE_ID, None)
WRITER = recipe.WRITER

_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
_digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
_refs = st.builds(lambda kind, id_: kind + id_, st.sampled_from("dm"), _ids)
_steps = st.none() | st.integers(0, object_names.MAX_STEP)
_manifests = st.builds(
    lambda job, epoch, step, host, random: object_names.manifest_name(
        job=job, epoch=epoch, step=step, host=host, random=random
    ),
    st.text(max_size=80),
    _steps,
    _steps,
    st.text(max_size=80),
    _ids,
)
_snapshots = st.binary(min_size=3, max_size=16).map(lambda data: f"cs-{data.hex()}")
_rounds = st.integers(0, object_names.MAX_NUMBER)


def _tuples(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=4).map(tuple)


_live = st.builds(LiveManifest, repository=_ids, snapshot=_snapshots, manifest=_manifests, digest=_digests)
_entries: st.SearchStrategy[LogEntry] = st.one_of(
    st.builds(LogHello, nonce=_ids, host=st.text(max_size=255), repository=_ids),
    st.builds(
        LogCommit,
        nonce=_ids,
        repository=_ids,
        snapshot=_snapshots,
        manifest=_manifests,
        digest=_digests,
        packs=_tuples(_refs),
    ),
    st.builds(LogFence, nonce=_ids, round=_rounds),
    st.builds(LogRemove, nonce=_ids, manifests=_tuples(_manifests)),
    st.builds(LogState, nonce=_ids, live=_tuples(_live), removed=_tuples(_manifests)),
    st.builds(LogRetired, nonce=_ids, live=_tuples(_live), removed=_tuples(_manifests)),
)


@given(_entries, st.integers(0, object_names.MAX_NUMBER), st.sampled_from((SEALER, CLEAR)))
def test_log_entries_are_read_as_they_were_written(entry: LogEntry, number: int, sealer: Sealer) -> None:
    """Every kind of entry comes back, at its own place in its own log alone."""
    data = encode_log_entry(sealer, WRITER, number, entry)
    assert decode_log_entry(sealer, WRITER, number, data) == entry
    for writer, other in ((WRITER, number ^ 1), (recipe.RETIRED_WRITER, number)):
        with pytest.raises(DamagedRemote, match=object_names.log_entry_name(writer, other)):
            decode_log_entry(sealer, writer, other, data)


@given(
    st.builds(StoredRound, nonce=_ids, condemned=_tuples(_refs), manifests=_tuples(_manifests)),
    _rounds,
    st.sampled_from(("begun", "final", "done")),
)
def test_rounds_are_read_as_they_were_written(
    content: StoredRound, number: int, part: object_names.RoundPart
) -> None:
    """A round's object comes back under its own name alone: its beginning is not its end."""
    data = encode_round(SEALER, number, part, content)
    assert decode_round(SEALER, number, part, data) == content
    with pytest.raises(DamagedRemote):
        decode_round(SEALER, number, "begun" if part == "final" else "final", data)


@given(
    st.builds(
        RemoteManifest,
        snapshot=st.binary(max_size=50),
        marks=st.binary(max_size=50),
        packs=_tuples(_refs),
        writer=_ids,
        host=st.text(max_size=100),
        job=st.text(max_size=100),
        epoch=_steps,
        step=_steps,
        previous=st.just("") | _digests,
    ),
    _manifests,
)
def test_manifests_are_read_as_they_were_written(content: RemoteManifest, name: str) -> None:
    """A manifest comes back under its own name, and its digest is that of its bytes."""
    data = encode_manifest(SEALER, name, content)
    assert decode_manifest(SEALER, name, data) == content
    assert documents.object_digest(data) != documents.object_digest(encode_manifest(SEALER, name, content))
    with pytest.raises(DamagedRemote):
        decode_manifest(SEALER, name + "0", data)


_COMMIT = {
    "kind": "commit",
    "nonce": "0a" * 16,
    "repository": "0b" * 16,
    "snapshot": "cs-abcdef",
    "manifest": recipe.MANIFEST,
    "digest": "0c" * 32,
    "packs": ["d" + "0e" * 16],
}


def read_entry(document: object) -> LogEntry:
    name = object_names.log_entry_name(WRITER, 0)
    return decode_log_entry(CLEAR, WRITER, 0, CLEAR.seal(name, msgspec.json.encode(document)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "other"},
        {"kind": 5},
        {"nonce": ""},
        {"nonce": "0a" * 16 + "\n"},
        {"nonce": "0A" * 16},
        {"repository": "../x"},
        {"snapshot": "../../etc"},
        {"snapshot": "cs-abcdef\n"},
        {"manifest": "manifests/../0-0/h-" + "00" * 16},
        {"manifest": "remote.json"},
        {"manifest": "packs/data/00/" + "00" * 16},
        {"digest": "0c" * 31},
        {"packs": ["x" + "0e" * 16]},
        {"packs": ["d../../remote.json"]},
        {"packs": "d" + "0e" * 16},
        {"packs": None},
    ],
    ids=str,
)
def test_impossible_entries_are_refused(fields: dict[str, object]) -> None:
    """An entry cannot name what is no pack, manifest or snapshot: a collector deletes what entries name."""
    assert read_entry(_COMMIT)
    with pytest.raises(DamagedRemote, match=f"w/{WRITER}/0000000000"):
        read_entry({**_COMMIT, **fields})


@pytest.mark.parametrize("document", [[], 5, None, {}, "commit", {"kind": "fence", "nonce": "0a" * 16}])
def test_other_documents_are_no_entries(document: object) -> None:
    """Documents of other forms, or with missing fields, are refused."""
    with pytest.raises(DamagedRemote):
        read_entry(document)


@pytest.mark.parametrize("number", [-1, object_names.MAX_NUMBER + 1, 1 << 70, 1.5])
def test_impossible_rounds_are_refused(number: float) -> None:
    """A fence names a round that can be."""
    with pytest.raises(DamagedRemote):
        read_entry({"kind": "fence", "nonce": "0a" * 16, "round": number})


def test_keys_of_later_versions_are_ignored() -> None:
    """An entry with a field that this version does not know is read."""
    assert read_entry({**_COMMIT, "later": [1, {"a": None}]}) == read_entry(_COMMIT)


@pytest.mark.parametrize(
    "entry",
    [
        LogHello(nonce="x", host="h", repository="0b" * 16),
        LogHello(nonce="0a" * 16, host="h" * 256, repository="0b" * 16),
        LogRemove(nonce="0a" * 16, manifests=("remote.json",)),
        LogFence(nonce="0a" * 16, round=-1),
    ],
    ids=lambda entry: type(entry).__name__,
)
def test_an_entry_that_no_reader_accepts_is_not_written(entry: LogEntry) -> None:
    """An entry that would stop every reader of the log is refused when it is made."""
    with pytest.raises(ValueError, match="could not be read back"):
        encode_log_entry(SEALER, WRITER, 0, entry)


def test_a_list_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document with more packs or manifests than the page allows, or that is larger, is refused."""
    many = {**_COMMIT, "packs": ["d" + "0e" * 16] * (documents.MAX_PACKS + 1)}
    with pytest.raises(DamagedRemote, match="length"):
        read_entry(many)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 300)
    with pytest.raises(DamagedRemote, match="300 are the limit"):
        read_entry(_COMMIT)
    with pytest.raises(ValueError, match="300 are the limit"):
        encode_log_entry(CLEAR, WRITER, 0, msgspec.convert(_COMMIT, LogCommit))


def test_the_longest_documents_fit() -> None:
    """A document with as many packs and manifests as a list may have is within the limit of its size."""
    longest = object_names.manifest_name(
        job="j" * 64, epoch=object_names.MAX_STEP, step=object_names.MAX_STEP, host="h" * 64, random="00" * 16
    )
    packs = ("d" + "0e" * 16,) * documents.MAX_PACKS
    content = StoredRound(nonce="0a" * 16, condemned=packs, manifests=(longest,) * documents.MAX_MANIFESTS)
    assert len(encode_round(CLEAR, 0, "final", content)) < documents.MAX_DOCUMENT_BYTES

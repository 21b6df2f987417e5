"""Tests of what a host remembers of the states on a remote."""

from __future__ import annotations

from pathlib import Path

from ciuic.protocol.stored_remotely import RemotePlace, StoredRecord, doubt_record, write_record
from ciuic.remote.object_names import manifest_name
from ciuic.remote.stored_facts import StoredFacts, _Note, newest_stored_states
from ciuic.repository.record_files import write_note

REPOSITORY = "ab" * 16
NAS = RemotePlace("nas", "memory://bucket")


def test_a_doubted_remote_has_nothing_to_resume_from(tmp_path: Path) -> None:
    """The newest state is told until the remote is doubted, and again once it was read."""
    name = manifest_name(job="run", epoch=1, step=7, host="h")
    fact = StoredFacts(snapshot="cs-000001", manifest=name, time_ns=1, tags=("training",), roots=(b"run",))
    record = StoredRecord(repository=REPOSITORY, stored=frozenset({"cs-000001"}), tail_ns=1)
    write_record("nas", record, tmp_path)
    (tmp_path / "nas" / REPOSITORY).mkdir()
    write_note(str(tmp_path / "nas" / REPOSITORY), "facts", _Note(facts=(fact,)), durable=False)
    assert newest_stored_states(tmp_path, NAS, [REPOSITORY])[b"run"].step == 7
    doubt_record(NAS, REPOSITORY, "it went back", tmp_path)
    assert newest_stored_states(tmp_path, NAS, [REPOSITORY]) == {}
    write_record("nas", record, tmp_path)
    assert newest_stored_states(tmp_path, NAS, [REPOSITORY])[b"run"].step == 7

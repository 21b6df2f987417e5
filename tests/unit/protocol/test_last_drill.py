"""Tests of the record of the last drill: durable for the status and the metrics, and hostile to both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic.protocol.last_drill import LastDrill, read_last_drill, write_last_drill
from ciuic.protocol.stored_remotely import StoredRecord, read_record, write_record

GOOD = LastDrill(time_ns=7, verdict="good", seconds=1.5, snapshot="cs-abcdef", files=3, bytes_read=9)


def test_the_last_drill_is_read_back_beside_the_record_of_the_upload(tmp_path: Path) -> None:
    """The newest outcome replaces the one before, and leaves what the process that uploads has noted."""
    stored = StoredRecord(repository="ab" * 16, stored=frozenset({"cs-abcdef"}))
    write_record("nas", stored, tmp_path)
    assert read_last_drill("nas", tmp_path) is None
    write_last_drill("nas", GOOD, tmp_path)
    assert read_last_drill("nas", tmp_path) == GOOD
    bad = LastDrill(time_ns=8, verdict="damaged", seconds=2, reason="x" * 100_000)
    write_last_drill("nas", bad, tmp_path)
    read = read_last_drill("nas", tmp_path)
    assert read is not None
    assert (read.time_ns, read.is_good, len(read.reason)) == (8, False, 1000)
    assert read_record("nas", tmp_path) == stored
    assert sorted(os.listdir(tmp_path / "nas")) == ["drill", "stored"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"time_ns":-1,"verdict":"good","seconds":1}']
)
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    """A record that is cut, empty or made up says nothing of a drill; nor do a link and a pipe."""
    (tmp_path / "nas").mkdir()
    path = tmp_path / "nas/drill"
    path.write_bytes(content)
    assert read_last_drill("nas", tmp_path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_last_drill("nas", tmp_path) is None
    path.unlink()
    write_last_drill("other", GOOD, tmp_path)
    path.symlink_to(tmp_path / "other/drill")
    assert read_last_drill("nas", tmp_path) is None

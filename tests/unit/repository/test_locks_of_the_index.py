"""Tests of the files of the index: SQLite keeps its locks (SIGBUS otherwise, at a commit beside an open), and no pipe is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic.repository.index_database import IndexDatabase, MissingIndexError, Transaction


def _locks_on(path: str) -> int:
    """Return how many locks this process has on a file (proc_locks(5))."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    inode = f":{os.stat(path).st_ino}"
    return sum(lock[4] == str(os.getpid()) and lock[5].endswith(inode) for lock in locks)


def test_opening_the_index_again_keeps_the_locks_on_it(tmp_path: Path) -> None:
    """With a reader open, a writer and further readers come and go, and SQLite's lock on the shared memory stays."""
    path = f"{tmp_path}/index.sqlite"
    IndexDatabase.open(path, "write").db.close()
    connections = [IndexDatabase.open(path, "read")]
    for mode in ("write", "read", "write"):
        connections.append(IndexDatabase.open(path, mode))
        assert _locks_on(f"{path}-shm") > 0
        connections.pop().db.close()
        assert _locks_on(f"{path}-shm") > 0
    writer = IndexDatabase.open(path, "write")
    with Transaction(writer.db):
        writer.set_fact("n", 1)
    for connection in (*connections, writer):
        connection.db.close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_pipe_in_the_place_of_the_index_holds_no_reader_up(tmp_path: Path, suffix: str) -> None:
    """Readers do without an index that is no regular file, in which SQLite would wait for a writer; a writer makes it anew."""
    path = f"{tmp_path}/index.sqlite"
    IndexDatabase.open(path, "write").db.close()
    Path(path + suffix).unlink(missing_ok=True)
    os.mkfifo(path + suffix)
    with pytest.raises(MissingIndexError):
        IndexDatabase.open(path, "read")
    IndexDatabase.open(path, "write").db.close()
    IndexDatabase.open(path, "read").db.close()

"""Files of holes that have more bytes together than a number of the format holds."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from support.cli_repository import FIRST_NS, CliRepository

from ciuic.types import Entry


def test_two_files_of_eight_exbibytes_are_committed_and_read(tmp_path: Path) -> None:
    """Their directory, its parent and the snapshot have the largest size that there is; everything is read, and verified."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    huge = Entry(
        name=b"", mode=stat.S_IFREG | 0o600, uid=os.geteuid(), gid=os.getegid(), mtime_ns=FIRST_NS, size_bytes=(1 << 63) - 4096
    )  # fmt: skip
    made.snapshot({b"in": {b"a": huge, b"b": huge}, b"c": huge, b"log": b"line\n"})
    id_ = made.snapshot({b"in": {b"a": huge, b"b": huge}, b"log": b"line\n"})
    for words in (("list",), ("show", str(id_)), ("verify", "--all", "--checksum"), ("stats",), ("check",)):
        done = made.run(*words)
        assert done.exit_code == 0, (words, done.output)

"""`ciuic export --as` of a file that truncate(2) made as large as nobody can store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.cli_repository import FIRST_NS, CliRepository

from ciuic.types import Entry


@pytest.mark.parametrize("form", ["dvc", "git-lfs", "hf"])
@pytest.mark.parametrize("path", ["", "/ckpt", "/ckpt/huge.bin"])
def test_a_file_larger_than_the_destination_is_refused_before_it_is_read(
    tmp_path: Path, form: str, path: str
) -> None:
    """The file is named, with its size and what there is; nothing is made."""
    huge = Entry(
        name=b"", mode=stat.S_IFREG | 0o600, uid=os.geteuid(), gid=os.getegid(), mtime_ns=FIRST_NS, size_bytes=1 << 60
    )  # fmt: skip
    repository = CliRepository(tmp_path / "repository", tmp_path / "root")
    id_ = repository.snapshot({b"ckpt": {b"huge.bin": huge}, b"log": b"line\n"})
    there = tmp_path / "artefact"
    words = ("export", str(id_), "-p", f"{repository.root}{path}", "--as", form, str(there))
    refused = repository.run(*words)
    assert refused.exit_code == 2, refused.output
    assert f"{repository.root}/ckpt/huge.bin has 1.00 EiB" in refused.stderr
    assert not there.exists()

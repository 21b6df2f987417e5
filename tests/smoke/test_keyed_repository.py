"""The daemon and the commands with a repository whose chunks are named by keyed BLAKE3 (format 3)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.live import Live
from support.stored import KEYED
from support.until import until

from ciuic.repository import Repository

pytestmark = pytest.mark.mount


def test_it_is_used_like_any_other(live: Live, root: Path) -> None:
    """A limited capture, prune, verification, comparison and restore work, and what was lost is back."""
    Repository.create(live.repository, identity=KEYED).close()
    content = os.urandom(3_000_000)
    (root / "model.bin").write_bytes(content)
    live.run("protect", str(root))
    live.start(root)
    until("the first snapshot", live.list)
    with open(root / "model.bin", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"changed")
    second = live.snapshot()
    (root / "model.bin").unlink()
    third = live.snapshot()
    assert str(root / "model.bin") in live.run("diff", second, third).stdout.decode()
    live.run("restore", "-s", second, "-p", str(root / "model.bin"), "--overwrite")
    assert (root / "model.bin").read_bytes() == content[:1_000_000] + b"changed" + content[1_000_007:]
    live.run("forget", "-y", second)
    live.run("prune")
    live.run("verify", "--all", "--checksum")
    live.run("check", "--read-data")
    assert not any(level in live.log_tail(1000) for level in ('"level": "warning"', '"level": "error"'))
    with Repository.open(live.repository) as repository:
        assert (repository.config.format, repository.identity) == (3, KEYED)

"""The daemon with a repository that it makes itself, and with one whose chunks are named by keyed BLAKE3 (format 3)."""

from __future__ import annotations

import os
import shutil
import socket
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


def test_a_silent_remote_delays_no_snapshot_and_is_not_silent_in_status(short_tmp: Path) -> None:
    """With a remote that accepts connections and never answers, snapshots begin at once, and status and an alert name what is missing."""
    root = short_tmp / "root"
    root.mkdir()
    (root / "file").write_text("content")
    with socket.create_server(("127.0.0.1", 0)) as silent, Live(short_tmp, impatient=True) as live:
        live.run("protect", "--offline", str(root))
        shutil.rmtree(live.repository)
        port = silent.getsockname()[1]
        with open(live.config, "a") as config:
            config.write(f'\n[remote]\nurl = "s3://bucket/prefix"\nendpoint = "http://127.0.0.1:{port}"\n')
        live.start(root)
        assert live.snapshot()
        status = live.status()
        assert status is not None
        assert status["repository"]["made_apart_from"] == status["remotes"][0]["name"]
        said = live.run("status").stdout.decode()
        assert "without the identity of the remote" in said

        def alerts() -> bool:
            now = live.status()
            return now is not None and "identity" in {alert["key"] for alert in now["alerts"]}

        until("the alert", alerts)
        # Nobody has asked the remote.
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
        live.stop()
        # A repository that is there is no news at the next start.
        live.start(root)
        status = live.status()
        assert status is not None
        assert not status["repository"].get("made_apart_from")

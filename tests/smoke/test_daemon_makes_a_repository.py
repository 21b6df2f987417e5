"""A daemon that finds a root and a remote in its configuration, and no repository."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from support.live import Live
from support.until import until

pytestmark = pytest.mark.mount


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

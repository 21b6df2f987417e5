"""The end of the machine with a real daemon and a real upload: notices of a cloud, and ``ciuic snapshot --before-end``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import Host
from support.live import installed
from support.metadata_service import service
from support.until import until

pytestmark = pytest.mark.mount
_BYTES = 12_000_000
_PATIENCE_SECONDS = 60.0


class _Aws:
    """Metadata service of AWS that says what the test sets."""

    def __init__(self) -> None:
        self.ends_in: float | None = None

    def notify(self, seconds: float) -> None:
        when = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        self.action = json.dumps({"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")})
        self.ends_in = seconds

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            return 200, "token", {}
        if path.endswith("instance-action") and self.ends_in is not None:
            return 200, self.action, {}
        return 404, "", {}


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Host]:
    """Provide a protected root with a remote, whose limit of the rate lets nothing of size through."""
    host = Host(short_tmp / "one")
    host.run("remote", "init", f"file://{short_tmp}/nas")
    text = host.config.read_text()
    host.config.write_text(text.replace("[remote]\n", '[remote]\nbandwidth = "64KiB"\n'))
    root = host.top / "root"
    root.mkdir()
    with host:
        host.run("protect", str(root))
        host.start(root)
        until("the first snapshot", host.list, _PATIENCE_SECONDS)
        yield host


@contextmanager
def _uploading(host: Host) -> Iterator[None]:
    with subprocess.Popen(
        [str(installed()), "remote", "upload"], env=host.env, cwd="/", stdin=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.kill()


def _stored(host: Host) -> list[str]:
    try:
        return list(json.loads((host.state / "remote" / "stored").read_bytes())["stored"])
    except FileNotFoundError:
        return []


def _before_end(host: Host) -> list[dict[str, Any]]:
    return list(host.json("list", "--tag", "before-preemption")["snapshots"])


def _alerts(host: Host) -> dict[str, str]:
    status = host.status()
    return {} if status is None else {alert["key"]: alert["message"] for alert in status["alerts"]}


def test_a_notice_cuts_once_and_the_remote_has_it(host: Host) -> None:
    """The upload leaves its limit for the snapshot of a notice; a killed daemon's successor hears it again; taken back, it is over."""
    cloud = _Aws()
    with service(cloud.answer) as address, _uploading(host):
        with host.config.open("a") as file:
            file.write(f'[preemption]\nclouds = ["aws"]\nendpoint = "{address}"\n')
        host.run("reload")
        until("the first upload", lambda: _stored(host), _PATIENCE_SECONDS)
        (host.top / "root" / "weights").write_bytes(os.urandom(_BYTES))
        cloud.notify(300)
        (found,) = until("the snapshot", lambda: _before_end(host), _PATIENCE_SECONDS)
        assert found["message"] == "AWS: spot instance, terminate"
        assert "AWS: spot instance, terminate" in _alerts(host)["preemption"]
        # At the limit it would take three minutes.
        until("the upload", lambda: found["id"] in _stored(host), _PATIENCE_SECONDS)
        assert len(_before_end(host)) == 1

        cloud.ends_in = None
        until("the end of the alert", lambda: "preemption" not in _alerts(host), _PATIENCE_SECONDS)
        until("the end of the deadline", lambda: not (host.state / "deadline").exists())


def test_an_end_by_hand_tells_what_made_it(host: Host) -> None:
    """With an upload all is stored and the exit code is 0; without one the command ends with the time, and with 8."""
    (host.top / "root" / "weights").write_bytes(os.urandom(_BYTES))
    with _uploading(host):
        until("the first upload", lambda: _stored(host), _PATIENCE_SECONDS)
        done = host.run("snapshot", "--before-end", "90s", "--cause", "Slurm: preempted", "--wait=remote")
        assert done.stdout.decode().strip() in _stored(host)
    (found,) = _before_end(host)
    assert found["message"] == "Slurm: preempted"
    (host.top / "root" / "weights").write_bytes(os.urandom(_BYTES))
    said = host.fails("snapshot", "--before-end", "3s", "--cause", "preStop", "--wait=remote", code=8)
    assert "remote remote: not stored when the time was over" in said
    assert "--before-end says when" in host.fails("snapshot", "--cause", "nothing", code=2)

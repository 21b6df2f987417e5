"""A remote on another machine that has nothing but sshd, a disk and ciuic: killed, lost and joined."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.cli_repository import Host
from support.live import installed
from support.ssh_server import SshServer
from support.until import until

from ciuic.remote.objects.urls import parse_url


@pytest.fixture
def url(ssh_server: SshServer) -> str:
    return ssh_server.new_url()


@pytest.fixture
def host(short_tmp: Path, ssh_server: SshServer) -> Host:
    made = Host(short_tmp / "one")
    made.env |= ssh_server.environment()
    return made


def restored(reader: Host, host: Host, url: str, snapshot: str) -> bytes:
    """Restore the file of a host's snapshot from the remote alone."""
    place = reader.top / "out"
    reader.run(
        "--repo", url, "restore", "-s", snapshot, "-p", str(host.top / "root" / "file"), "-d", str(place)
    )
    (found,) = [path.read_bytes() for path in place.rglob("file")]
    return found


def test_a_host_is_lost_and_its_snapshots_are_not(
    host: Host, short_tmp: Path, ssh_server: SshServer, url: str
) -> None:
    """With a key that may only add, a host uploads; a new one joins with the recovery key and restores exactly."""
    forced = f"{ssh_server.program} remote serve --stdio --append-only {parse_url(url).prefix}"
    ssh_server.admit(f'restrict,command="{forced}"')
    try:
        recovery = host.json("remote", "init", url)["recovery_key"]
        content = os.urandom(3 << 20)
        newest = host.snapshot_of(*(content[:at] for at in (1 << 20, 2 << 20, 3 << 20)))
        ids = sorted(row.id for row in host.list())
        host.run("remote", "upload", "--once")
        (status,) = host.json("remote", "status", "--contact")["remotes"]
        (server,) = status["contact"]["servers"]
        assert (server["append_only"], server["directory"]) == (True, parse_url(url).prefix)
        said = host.run("remote", "status", "--contact").stdout.decode()
        assert f"ciuic {server['program']} serves" in said
        assert "only added" in " ".join(said.split())
    finally:
        ssh_server.admit()
    new = Host(short_tmp / "new")
    new.env |= ssh_server.environment() | {"CIUIC_REMOTE_RECOVERY_KEY": recovery}
    new.run("remote", "join", url)
    listed = new.json("--repo", url, "list")
    assert sorted(one["id"] for one in listed["snapshots"]) == ids
    new.run("--repo", url, "verify", "--all", "--checksum")
    assert restored(new, host, url, newest) == content


def test_uploads_that_are_killed_on_either_side_end_whole(host: Host, url: str) -> None:
    """`remote upload` is killed, and its connections are, at random: in the end every snapshot is there and verifies."""
    host.run("remote", "init", url)
    content = os.urandom(96 << 20)
    newest = host.snapshot_of(*(content[: (number + 1) << 24] for number in range(6)))
    ids = sorted(row.id for row in host.list())
    directory = os.fsencode(parse_url(url).prefix)
    killed = 0
    for turn in range(3):
        upload = subprocess.Popen(
            [str(installed()), "remote", "upload", "--once"],
            env=host.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if turn < 2:
            until("a server", lambda: servers(directory))
            time.sleep(0.3 + turn / 2)
            upload.kill()
        # The last one goes on by itself, over new connections.
        while turn == 2 and upload.poll() is None and killed < 4:
            for pid in servers(directory):
                # It may have ended by itself since it was found.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.7)
        upload.wait(200)
    host.run("remote", "upload", "--once")
    assert killed
    assert sorted(one["id"] for one in host.json("--repo", url, "list")["snapshots"]) == ids
    host.run("--repo", url, "verify", "--all", "--checksum")
    assert restored(host, host, url, newest) == content


def servers(directory: bytes) -> list[int]:
    """Return the processes that serve a directory."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            with contextlib.suppress(OSError):
                arguments = (one / "cmdline").read_bytes().split(b"\0")
                if b"--stdio" in arguments and directory in arguments:
                    found.append(int(one.name))
    return found

"""Host with a repository of real directories, and its upload to a remote, for tests that read remotes.

A machine that never saw the host has a URL, a secret and an empty home, and runs the installed command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import trees
from support.live import Commands
from support.restoring import take

from ciuic.config import RemoteConfig
from ciuic.remote.access import Remote, init_remote
from ciuic.remote.objects.model import Objects
from ciuic.remote.reading.opening import ReadableRemote, read_remote
from ciuic.remote.replication import Replication
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.uploader import Labels, Persistence
from ciuic.repository import Repository
from ciuic.repository.pack_directory import Packs
from ciuic.types import Snapshot

BLOCK = 4096


def new_remote(objects: Objects, *, sealed: bool = True) -> Remote:
    """Make a remote."""
    master = MasterKey.generate() if sealed else None
    return init_remote(objects, master=master, block_size=BLOCK)


def flip_object(objects: Objects, name: str, at: int = -1) -> None:
    """Flip a bit of an object."""
    data = bytearray(objects.get(name))
    data[at] ^= 1
    objects.put(name, [bytes(data)])


class RemoteHost:
    """Repository of one host that uploads to a remote.

    Args:
        place: Directory of the host; missing.
        remote: Open remote.
        name: Name of the host.
        own_identity: The repository names chunks in its own way.
    """

    def __init__(
        self, place: Path, remote: Remote, *, name: str = "host", own_identity: bool = False
    ) -> None:
        self.remote = remote
        self.name = name
        self.root = place / "root"
        self.root.mkdir(parents=True)
        (place / "state").mkdir()
        self._place = place
        identity = None if own_identity else remote.identity
        self.repository = Repository.create(place / "repository", block_size=BLOCK, identity=identity)

    def copy(self, place: Path, remote: Remote) -> RemoteHost:
        """Return a host with the same root, repository and state of the upload, in another place."""
        shutil.copytree(self._place, place, ignore=shutil.ignore_patterns("root"))
        copied = object.__new__(RemoteHost)
        copied.remote, copied.name, copied.root, copied._place = remote, self.name, self.root, place
        copied.repository = Repository.open(place / "repository")
        return copied

    def snapshot(self) -> Snapshot:
        """Take a snapshot of the root."""
        return take(self.repository, self.root)

    def upload(
        self,
        labels: Callable[[Repository, Snapshot], Labels] = lambda repository, snapshot: Labels(),
        again: Collection[str] = (),
        problem: Callable[[str], None] = lambda text: None,
        stop: threading.Event | None = None,
    ) -> None:
        """Upload what the remote lacks, and ``again`` although it was given up; ``labels`` is called when the chunks are stored, before the manifest."""
        packs = Packs(
            f"{self.repository.path}/packs", bytes.fromhex(self.repository.id), self.repository.config.hash
        )
        Replication(
            self.repository,
            packs,
            RemoteConfig(name="remote", url="memory://unused"),
            self._place / "state",
            host=self.name,
            persist=Persistence(stop or threading.Event(), problem),
            labels=labels,
            again=again,
        ).catch_up(self.remote)


@contextmanager
def reading(remote: Remote, cache: Path, **options: Any) -> Iterator[ReadableRemote]:
    """Read a remote with a cache of the caller's, as a machine that has nothing but the key."""
    os.makedirs(cache, exist_ok=True)
    with read_remote(remote, cache_root=cache, retry_seconds=1, **options) as opened:
        yield opened


class Elsewhere:
    """Machine with the URL and a secret, and an empty home."""

    def __init__(self, place: Path, url: str, secrets: Mapping[str, str]) -> None:
        self.place = place
        self.home = place / "home"
        self.home.mkdir(mode=0o700)
        self.url = url
        self.secrets = dict(secrets)
        """Variables beyond those of every machine; also where the server is."""
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
        }

    def start(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command; any exit code is accepted."""
        env = self.environment | self.secrets
        return Commands.run_bytes("--repo", self.url, *arguments, env=env, timeout=300)

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command that ends with this code; return its output."""
        done = self.start(*arguments)
        assert done.returncode == code, (done.stdout + done.stderr).decode()
        assert b"Traceback" not in done.stderr
        return done.stdout.decode() + (done.stderr.decode() if code else "")

    def listed(self) -> set[str]:
        """Return the ids of all snapshots."""
        lines = self.run("list", "--machine-readable").splitlines()
        return {line.split("|")[0] for line in lines}

    def differences(self, id_: str, root: Path, expected: trees.Manifest, *options: str) -> list[str]:
        """Restore a root into a new directory; return what is not as it was."""
        there = Path(tempfile.mkdtemp(dir=self.place))
        # --special: also from a remote in clear, whose content is the test's own.
        self.run("restore", "-s", id_, "-p", str(root), "-d", str(there), "--special", *options)
        return trees.differences(expected, trees.manifest(there / root.name))

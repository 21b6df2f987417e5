"""Host with a repository of real directories, and its upload to a remote, for tests that read remotes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.restoring import take

from ciuic.config import RemoteConfig
from ciuic.remote.access import Remote, init_remote
from ciuic.remote.objects.model import Objects
from ciuic.remote.reading.opening import ReadableRemote, read_remote
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.upload.replication import Replication
from ciuic.remote.upload.uploader import Labels
from ciuic.repository import Repository
from ciuic.repository.packs.pack_directory import Packs
from ciuic.types import Snapshot

BLOCK = 4096


def new_remote(objects: Objects, *, sealed: bool = True) -> Remote:
    """Make a remote."""
    return init_remote(objects, master=MasterKey.generate() if sealed else None, block_size=BLOCK)


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
            stop=threading.Event(),
            labels=labels,
            again=again,
        ).catch_up(self.remote)


@contextmanager
def reading(remote: Remote, cache: Path, **options: Any) -> Iterator[ReadableRemote]:
    """Read a remote with a cache of the caller's, as a machine that has nothing but the key."""
    os.makedirs(cache, exist_ok=True)
    with read_remote(remote, cache_root=cache, retry_seconds=1, **options) as opened:
        yield opened

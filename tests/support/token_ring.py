"""Tokens that go around hosts with a daemon each, whose snapshots show whether all were cut at one instant."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.live import Live, installed

from ciuic.repository import Repository
from ciuic.types import ChunkId, Snapshot

TOKENS = 3


class Host:
    """A daemon with one root, and the files of the tokens in it."""

    def __init__(
        self, name: str, members: Sequence[str], live: Live, root: Path, prefix: Sequence[str] = ()
    ) -> None:
        """Take a daemon that runs; ``prefix``: words that run a command on the host."""
        self.name = name
        self.live = live
        self.root = root
        self.members = tuple(members)
        self._prefix = tuple(prefix)

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the committed snapshots of sets, by the name of the set."""
        with Repository.open(self.live.repository) as repository:
            loaded = [repository.snapshots.load(info.id) for info in repository.snapshots.list()]
        return {one.set_member.name: one for one in loaded if one.set_member is not None}

    def numbers(self, snapshot: Snapshot) -> list[int]:
        """Return the number of each token in a snapshot."""
        found = []
        with Repository.open(self.live.repository) as repository:
            for token in range(TOKENS):
                entry = repository.trees.entry(snapshot.roots[0].entry.content, b"token-%d" % token)
                assert entry is not None
                data = repository.chunks.get(ChunkId(entry.content))[: entry.size_bytes]
                found.append(int(data))
        return found

    def start(
        self,
        set_name: str,
        *options: str,
        program: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start the command of this host for a set."""
        words = (
            "snapshot",
            "--set",
            set_name,
            "--hosts",
            ",".join(self.members),
            "--member",
            self.name,
            "--wait",
        )
        return subprocess.Popen(
            [*self._prefix, *(program or (str(installed()),)), *words, *options],
            env={**self.live.env, **(variables or {})}, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


class Ring:
    """Tokens that go around the hosts, for as long as the block lasts."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        self._stop = threading.Event()
        self._inboxes = {
            (at, token): queue.Queue[int]() for at in range(len(hosts)) for token in range(TOKENS)
        }
        self._threads = [
            threading.Thread(target=self._pass_on, args=place, daemon=True) for place in self._inboxes
        ]
        self.written = 0
        self.longest_seconds = 0.0
        """Longest time that a write took."""

    def __enter__(self) -> Ring:
        for at, host in enumerate(self._hosts):
            for token in range(TOKENS):
                # As if each token had been around once.
                self.write(host, token, at)
        for token in range(TOKENS):
            self._inboxes[0, token].put(len(self._hosts) - 1)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for inbox in self._inboxes.values():
            inbox.put(-1)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a writer is still held"

    def go_on(self) -> None:
        """Wait until all hosts write: nobody is held for ever."""
        wanted = self.written + 2 * len(self._hosts)
        while self.written < wanted:
            self._stop.wait(0.01)

    def _pass_on(self, at: int, token: int) -> None:
        while (number := self._inboxes[at, token].get()) >= 0 and not self._stop.is_set():
            began = time.monotonic()
            self.write(self._hosts[at], token, number + 1)
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
            self.written += 1
            self._inboxes[(at + 1) % len(self._hosts), token].put(number + 1)

    @staticmethod
    def write(host: Host, token: int, number: int) -> None:
        """Write the number of a token on a host."""
        fd = os.open(host.root / f"token-{token}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, b"%012d" % number, 0)
            # What is only in the kernel's cache is not ordered against other hosts.
            os.fsync(fd)
        finally:
            os.close(fd)


def require_one_instant(hosts: list[Host], snapshots: list[Snapshot]) -> None:
    """Assert that the numbers of each token follow each other in these hosts' snapshots.

    Of a host that is missing, one may be missing.
    """
    numbers = [host.numbers(snapshot) for host, snapshot in zip(hosts, snapshots, strict=True)]
    for token in range(TOKENS):
        seen = sorted(of_host[token] for of_host in numbers)
        assert len(set(seen)) == len(seen)
        assert seen[-1] - seen[0] < len(hosts[0].members), (
            f"token {token}: {[of_host[token] for of_host in numbers]}"
        )

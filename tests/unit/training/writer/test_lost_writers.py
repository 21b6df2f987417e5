"""Each save that was handed to a writer has one end, whenever the writer is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ciuic.training.writer import client as client_module
from ciuic.training.writer.client import WriterClient
from ciuic.training.writer.messages import (
    Begin,
    FromWriter,
    Manifest,
    NotSaved,
    RetentionRules,
    Saved,
    SaveRequest,
    receive_from_trainer,
    send,
)

_STEPS = st.lists(st.sampled_from(["save", "read", "answer", "kill", "poll", "awaited"]), max_size=30)


class _Writers:
    """Writers that a test acts for: each has read so many requests, and answered some of these."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.read: list[int] = []
        self.answered: set[int] = set()

    def start(self, theirs: socket.socket, _: int) -> subprocess.Popen[bytes]:
        """Take the place of a started process."""
        self.sock, self.read = theirs.dup(), []
        return subprocess.Popen([sys.executable, "-c", ""])

    def act(self, step: str) -> None:
        """Read one request, answer the oldest that was read, or end."""
        if self.sock is None:
            return
        if step == "read":
            self.sock.setblocking(False)
            try:
                message = receive_from_trainer(self.sock)
            except BlockingIOError:
                return
            if message is None:
                return
            request, fds = message
            for fd in fds:
                os.close(fd)
            if isinstance(request, SaveRequest):
                self.read.append(request.number)
        elif step == "answer" and self.read:
            number = self.read.pop(0)
            send(self.sock, Saved(number=number, id="s", size_bytes=1, new_bytes=1, seconds=0.1))
            self.answered.add(number)
        elif step == "kill":
            self.sock.close()
            self.sock = None


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[WriterClient, _Writers]]:
    """Return a function that makes a client and the writers it will start."""

    def start() -> tuple[WriterClient, _Writers]:
        writers = _Writers()
        monkeypatch.setattr(client_module, "_start_writer", writers.start)
        begin = Begin(repository=str(tmp_path), root=b"/t", rules=RetentionRules(keep=()))
        return WriterClient(begin), writers

    return start


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=_STEPS)
def test_each_save_has_one_end(
    steps: list[str], started: Callable[[], tuple[WriterClient, _Writers]]
) -> None:
    """Each submitted save ends once: saved if the writer had answered so, else not saved, `close` included."""
    client, writers = started()
    submitted: set[int] = set()
    ends: list[FromWriter] = []
    for step in steps:
        if step == "save" and (slot := client.reserve(1)) is not None:
            manifest = Manifest(time_ns=1, message="", tags=(), files=[])
            submitted.add(client.submit(slot, manifest, 0))
        elif step == "poll":
            ends += client.poll()
        elif step == "awaited":
            client.awaited()
        else:
            writers.act(step)
    writers.act("kill")
    ends += client.close(10)
    assert sorted(one.number for one in ends if isinstance(one, (Saved, NotSaved))) == sorted(submitted)
    assert {one.number for one in ends if isinstance(one, Saved)} == writers.answered


def test_small_states_are_queued(started: Callable[[], tuple[WriterClient, _Writers]]) -> None:
    """Eight small states may wait for the writer, and two large ones."""
    client, _ = started()
    taken = dict.fromkeys((1 << 10, 8 << 20), 0)
    for size in taken:
        slots = []
        while client.can_take and (slot := client.reserve(size)) is not None:
            slots.append(slot)
        taken[size] = len(slots)
        for slot in slots:
            client.release(slot)
    assert list(taken.values()) == [8, 2]
    client.close(0)


def test_an_arena_that_no_thread_prepares_is_free(
    started: Callable[[], tuple[WriterClient, _Writers]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no further thread can be started, the first save takes the arena unprepared."""
    client, _ = started()
    monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
    client.prepare(1)
    assert all(slot.is_free for slot in client.slots)
    client.close(0)

"""Messages of a training that waits for the writer, between those that give it something to do."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ciuic import SnapshotManager
from ciuic.training.writer.client import WriterClient
from ciuic.training.writer.messages import Awaited, Finish, NotSaved, SaveRequest, send
from ciuic.training.writer_process import _Trainer


def test_awaited_messages_are_recorded_not_returned() -> None:
    """`Awaited` is recorded and not returned, other messages keep their order, and `Finish` counts as waiting."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    trainer = _Trainer(theirs, os.getpid())
    send(ours, Awaited(3))
    heard = [trainer.waiting()]
    assert (trainer.awaited, trainer.at_once) == (3, 0)
    send(ours, Awaited(3, at_once=True))
    save = SaveRequest(number=4, arena=0, manifest_offset=0, manifest_bytes=1)
    send(ours, save)
    heard.append(trainer.waiting())
    assert heard == [False, True]
    assert (trainer.awaited, trainer.at_once) == (3, 3)
    closing = [trainer.closing]
    send(ours, Finish())
    assert trainer.next() == save
    closing.append(trainer.closing)
    assert trainer.next() == Finish()
    ours.close()
    closing.append(trainer.closing)
    assert closing == [False, True, False]
    assert trainer.next() is None
    theirs.close()
    os.close(trainer.pidfd)


@pytest.mark.parametrize("failed", [False, True])
def test_a_failing_trainer_is_known_before_its_process_ends(failed: bool) -> None:
    """A `Finish` behind a further save tells that the trainer fails, and takes no message away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    trainer = _Trainer(theirs, os.getpid())
    save = SaveRequest(number=4, arena=0, manifest_offset=0, manifest_bytes=1)
    send(ours, save)
    assert not trainer.has_failed()
    send(ours, Finish(failed))
    assert trainer.has_failed() is failed
    assert (trainer.next(), trainer.next()) == (save, Finish(failed))
    ours.close()
    theirs.close()
    os.close(trainer.pidfd)


def test_saves_of_a_trainer_that_ended_with_answers_unread_are_made() -> None:
    """The writer receives saves of a killed trainer that had not read the last answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    trainer = _Trainer(theirs, os.getpid())
    saves = [SaveRequest(number=n, arena=0, manifest_offset=0, manifest_bytes=1) for n in (4, 5)]
    for save in saves:
        send(ours, save)
    send(theirs, NotSaved(number=3, reason="unread"))
    ours.close()
    assert [trainer.next(), trainer.next(), trainer.next()] == [*saves, None]
    theirs.close()
    os.close(trainer.pidfd)


@pytest.mark.parametrize(("error", "failed"), [(None, False), (RuntimeError, True), (SystemExit, False)])
def test_the_writer_is_told_of_an_end_by_an_error(
    error: type[BaseException] | None, failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that ends the program is told; SystemExit, by which preempted ranks end alike, is none."""
    told: list[bool] = []
    close = WriterClient.close

    def note(self: WriterClient, *args: Any, failed: bool = False) -> Any:
        told.append(failed)
        return close(self, *args, failed=failed)

    monkeypatch.setattr(WriterClient, "close", note)
    monkeypatch.delattr(sys, "last_value", raising=False)
    manager = SnapshotManager(tmp_path)
    try:
        with manager:
            if error is not None:
                raise error
    except (RuntimeError, SystemExit):
        pass
    assert told == [failed]

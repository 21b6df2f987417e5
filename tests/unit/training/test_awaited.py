"""Messages of a training that waits for the writer, between those that give it something to do."""

from __future__ import annotations

import os
import socket

from ciuic.training.protocol.messages import Awaited, Finish, SaveRequest, send
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

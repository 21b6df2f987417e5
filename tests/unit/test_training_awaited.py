"""What the writer hears of a training that stands still, between the messages that give it something to do."""

from __future__ import annotations

import os
import socket

from ciuic.training.messages import Awaited, End, Save, send
from ciuic.training.writer_process import _Trainer


def test_who_waits_gives_the_writer_nothing_to_do() -> None:
    """It is noted, and whatever else comes is in its order; the end of a program is somebody who waits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    trainer = _Trainer(theirs, os.getpid())
    send(ours, Awaited(3))
    heard = [trainer.waiting()]
    assert (trainer.awaited, trainer.at_once) == (3, 0)
    send(ours, Awaited(3, at_once=True))
    save = Save(number=4, arena=0, manifest_offset=0, manifest_bytes=1)
    send(ours, save)
    heard.append(trainer.waiting())
    assert heard == [False, True]
    assert (trainer.awaited, trainer.at_once) == (3, 3)
    closing = [trainer.closing]
    send(ours, End())
    assert trainer.next() == save
    closing.append(trainer.closing)
    assert trainer.next() == End()
    ours.close()
    closing.append(trainer.closing)
    assert closing == [False, True, False]
    assert trainer.next() is None
    theirs.close()

"""The process that puts a trainer's state into the repository, and that outlives the trainer.

It is a session of its own, so that what ends the trainer's process group does not end it, and takes its time from what the machine
has to spare. When the trainer is gone (killed, crashed, out of memory) it finishes what it was given whole, and ends. Whatever it
cannot do it says to the trainer, and to the standard error when there is none to say it to; nothing of it reaches the training.

After a snapshot, while nothing else is asked of it, it applies the rules of preservation: see `housekeeping`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from ciuic.errors import CiuicError
from ciuic.readiness import readable
from ciuic.repository import Repository, Writer
from ciuic.repository.claim import Claim
from ciuic.training import notices, parts
from ciuic.training.arena import ReadArena
from ciuic.training.codecs import Chooser, Chosen
from ciuic.training.committing import Known, commit, put_files
from ciuic.training.filesystem import Answer
from ciuic.training.forecast import measure
from ciuic.training.housekeeping import DAMAGE_NOTE, Housekeeping
from ciuic.training.known_to_daemon import Watched
from ciuic.training.messages import (
    Attach,
    Awaited,
    Begin,
    End,
    FromTrainer,
    FromWriter,
    Manifest,
    Measured,
    Note,
    Notice,
    NotSaved,
    Part,
    Put,
    Save,
    Saved,
    StoredFile,
    receive_from_trainer,
    send,
)
from ciuic.types import Snapshot

_LOCK_WAIT_SECONDS: Final = 60.0
_LAST_SECONDS: Final = 10.0
"""For what old snapshots still need when the program is done: it waits for us."""
_TURN_WAIT_SECONDS: Final = 3600.0
"""Where every rank puts its own part, one waits for all before it."""
_FILES_IN_A_MESSAGE: Final = 100
_AUTOGROUP: Final = "/proc/self/autogroup"


def main(fd: int, trainer_pid: int) -> None:
    """The whole life of the process. ``fd``: its end of the socket pair."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer's to answer; we end after it
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    trainer = _Trainer(sock, trainer_pid)
    begin = trainer.next()
    if not isinstance(begin, Begin):
        return
    known = Watched(trainer, begin.watched) if begin.watched is not None else None
    _step_back(begin.nice)
    trainer.tell(Measured(measure(begin.repository)))
    notices.watch(begin.services, trainer.notify, lambda text: trainer.tell(Note("no_notices", text)))
    _Writer(trainer, begin).run()
    if known is not None:
        known.trainer_gone()


class _Trainer:
    """The messages of the trainer, also those that it sent before it died."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.fds: deque[int] = deque()
        """That came with the message that was returned last."""
        self.awaited = 0
        """The newest save for which the training stands still."""
        self.at_once = 0
        """And the newest for which there is no time but to write it."""
        self._heard: deque[tuple[FromTrainer, list[int]]] = deque()
        """And not acted upon."""
        self._ended = False
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.life = _life_of(pid)
        """Its pidfd, or -1."""
        if self.life >= 0:
            self._poll.register(self.life, select.POLLIN)

    def next(self) -> FromTrainer | None:
        """Waits for it; None when the trainer is gone and all it said was heard.

        Its children may have the socket too, so that its end alone does not tell.
        """
        while not self.waiting():
            ready = dict(self._poll.poll())
            if self._sock.fileno() not in ready and self.life in ready and not self.waiting():
                return None
        if not self._heard:
            return None
        message, fds = self._heard.popleft()
        self.fds.extend(fds)
        return message

    def waiting(self) -> bool:
        """Whether there is something to do, or the end."""
        while not self._heard and not self._ended and readable(self._sock.fileno()):
            got = receive_from_trainer(self._sock)
            if got is None:
                self._ended = True
            elif isinstance(got[0], Awaited):
                self.awaited = got[0].number
                self.at_once = got[0].number if got[0].at_once else self.at_once
            else:
                self._heard.append(got)
        return bool(self._heard) or self._ended

    def is_gone(self) -> bool:
        """Whether its process has ended. False where the kernel does not tell."""
        return self.life >= 0 and readable(self.life)

    @property
    def closing(self) -> bool:
        """Whether it waits for what it has staged, and nothing else will come."""
        return self.waiting() and bool(self._heard) and isinstance(self._heard[0][0], End)

    def tell(self, message: FromWriter) -> None:
        try:
            send(self._sock, message)
        except OSError:
            if isinstance(message, (NotSaved, Note)):
                text = message.reason if isinstance(message, NotSaved) else message.text
                print(f"ciuic: {text}", file=sys.stderr, flush=True)  # noqa: T201

    def notify(self, event: notices.Event) -> None:
        """From another thread: sending keeps messages whole."""
        self.tell(Notice(event.text, event.seconds, event.certain))
        if self.life >= 0:
            with suppress(OSError):  # it is gone
                signal.pidfd_send_signal(self.life, signal.SIGURG)


class _Writer:
    def __init__(self, trainer: _Trainer, begin: Begin) -> None:
        self._trainer = trainer
        self._begin = begin
        self._arenas: dict[int, ReadArena] = {}
        self._known = Known()
        self._chooser = Chooser(begin.compression, begin.rules)
        # Whether a part belongs to a snapshot, so that it can be the base of a difference, another process decides.
        self._of_parts = Chooser(begin.compression, None)
        self._housekeeping = Housekeeping(
            begin.repository,
            begin.root,
            begin.rules,
            should_stop=trainer.waiting,
            tell=self._housekeeping_says,
        )

    def run(self) -> None:
        while (message := self._trainer.next()) is not None and not isinstance(message, End):
            if isinstance(message, Attach):
                self._attach(message.arena, self._trainer.fds.popleft())
            elif isinstance(message, Save):
                self._save(message)
        if message is not None:
            self._keep_house(lambda: self._housekeeping.finish(_LAST_SECONDS))

    def _attach(self, number: int, fd: int) -> None:
        before = self._arenas.pop(number, None)
        if before is not None:
            before.close()
        self._arenas[number] = ReadArena(fd)

    def _save(self, save: Save) -> None:
        claim = Claim.taken_over(self._trainer.fds.popleft()) if save.claim else None
        asked = save.asking is not None and not save.asking.problem
        files = Answer(save.asking, self._trainer.fds.popleft() if asked else None)
        try:
            saved = self._answer(save, files)
        finally:
            files.close()
            if claim is not None:
                claim.release()
        if saved:
            self._keep_house(self._housekeeping.after)

    def _answer(self, save: Save, files: Answer) -> bool:
        """Whether there is a new snapshot. ``files``: what becomes of those that were asked for with it."""
        began = time.monotonic()
        try:
            memory = self._arenas[save.arena].memory
            packed = memory[save.manifest_offset : save.manifest_offset + save.manifest_bytes]
            manifest = msgspec.msgpack.decode(packed, type=Manifest)
            if not save.commit:
                self._put(save.number, memory, manifest, began)
                return False
            manifest = self._with_parts(manifest)
            try:
                snapshot, waited = self._commit(save.number, memory, manifest, files)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._forget()
                self._housekeeping.make_room()
                snapshot, waited = self._commit(save.number, memory, manifest, files)
        except Exception as error:  # whatever it is, the training goes on, and so do we
            self._forget()
            self._trainer.tell(NotSaved(number=save.number, reason=_words(error)))
            return False
        self._trainer.tell(
            Saved(
                number=save.number,
                id=str(snapshot.id),
                size_bytes=snapshot.size_bytes,
                new_bytes=snapshot.new_bytes,
                seconds=time.monotonic() - began,
                waited_seconds=waited,
                pair=snapshot.pair,
                pair_note=files.note,
            )
        )
        return True

    def _housekeeping_says(self, note: Note) -> None:
        if note.event == DAMAGE_NOTE:
            self._forget()  # else the next snapshot would share what is damaged
        self._trainer.tell(note)

    def _forget(self) -> None:
        """What is in the repository is not what we think."""
        self._known = Known()
        self._chooser = Chooser(self._begin.compression, self._begin.rules)

    def _commit(
        self, number: int, memory: memoryview, manifest: Manifest, files: Answer
    ) -> tuple[Snapshot, float]:
        """And how long it waited for codecs."""
        with (
            Repository.open(self._begin.repository) as repository,
            repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager") as writer,
        ):
            chosen = self._begun(self._chooser, writer, number, manifest)
            snapshot = commit(
                repository, writer, memory, manifest, self._begin.root, self._known, chosen, files.pair
            )
            self._chooser.done(chosen)
            return snapshot, writer.waited_seconds

    def _begun(self, chooser: Chooser, writer: Writer, number: int, manifest: Manifest) -> Chosen:
        trainer = self._trainer
        return chooser.begin(
            writer,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            in_a_hurry=lambda: (trainer.waiting() and not trainer.closing) or trainer.at_once >= number,
            awaited=lambda: trainer.closing or trainer.awaited >= number,
        )

    def _keep_house(self, what: Callable[[], None]) -> None:
        try:
            what()
        except (CiuicError, OSError) as error:
            self._trainer.tell(Note("housekeeping_failed", _words(error)))

    def _with_parts(self, manifest: Manifest) -> Manifest:
        """With what the other ranks' writers have stored, when they have. OSError."""
        together = manifest.together
        if together is None:
            return manifest
        try:
            stored = parts.collect(self._begin.repository, together, self._trainer.is_gone)
        finally:
            parts.clear(self._begin.repository, together.token)
        return msgspec.structs.replace(manifest, stored=[*manifest.stored, *stored])

    def _put(self, number: int, memory: memoryview, manifest: Manifest, began: float) -> None:
        together = manifest.together
        if together is None:
            stored, new_bytes = self._stored(number, memory, manifest)
            for first in range(0, len(stored), _FILES_IN_A_MESSAGE):
                self._trainer.tell(Part(number=number, files=stored[first : first + _FILES_IN_A_MESSAGE]))
        else:
            with parts.answer(self._begin.repository, together) as answer:
                try:
                    stored, new_bytes = self._stored(number, memory, manifest)
                except Exception as error:
                    answer.failed(_words(error))
                    raise
                answer.stored(stored)
        self._trainer.tell(Put(number=number, new_bytes=new_bytes, seconds=time.monotonic() - began))

    def _stored(self, number: int, memory: memoryview, manifest: Manifest) -> tuple[list[StoredFile], int]:
        """What another process makes a snapshot of, and by how much the repository has grown."""
        with (
            Repository.open(self._begin.repository) as repository,
            repository.writer(wait_seconds=_TURN_WAIT_SECONDS, command="part of a snapshot") as writer,
        ):
            chosen = self._begun(self._of_parts, writer, number, manifest)
            stored = put_files(repository, writer, memory, manifest, chosen)
            self._of_parts.done(chosen)
            return stored, writer.new_bytes


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


def _life_of(pid: int) -> int:
    """A descriptor that becomes readable when this process ends; -1 where the kernel has none (before Linux 5.3)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _step_back(nice: int) -> None:
    """Gives way to the training, also where the kernel schedules by sessions."""
    with suppress(OSError):
        os.nice(nice)
    with suppress(OSError), open(_AUTOGROUP, "w") as file:
        file.write(str(nice))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The files of the instant of a snapshot: asked for by the trainer at its step boundary, answered to the writer (ciuic.pairing).

Guarantees: the training waits for nothing of it. One connection is opened and one message sent, without blocking, before the state is
copied; the writer has the answer by the time it commits, or commits without. Whatever the daemon does or refuses, the training's snapshot is
made all the same, and says what became of the other half. What was refused is logged once, until something else is.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from ciuic.errors import CiuicError
from ciuic.pairing import ANSWER_SECONDS, Cut, Taken, answer, ask, pair_socket, text_of
from ciuic.training.logs import log
from ciuic.training.messages import Asking, Manifest, Saved
from ciuic.training.outcome import Stats
from ciuic.types import Pair

Roots = bool | Iterable[str | os.PathLike[str]]
"""True: all that this user may have snapshots of."""
_ID_BYTES: Final = 4
"""The id is chosen without looking at those that there are; were it taken, the writer would choose another."""


class Asked:
    """What was sent, and the connection to which the answer comes, if one does."""

    def __init__(self, asking: Asking, connection: socket.socket | None = None) -> None:
        self.asking = asking
        self._connection = connection

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self._connection is None else (self._connection.fileno(),)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Filesystem:
    """For one manager. ``wanted``: for snapshots that do not say otherwise. ValueError."""

    def __init__(self, wanted: Roots, save_dir: Path, stats: Stats) -> None:
        self._wanted = _roots_of(wanted)
        self._repository = text_of(os.path.realpath(save_dir))
        self._stats = stats
        self._socket = "" if self._wanted is None else pair_socket(os.environ)
        """Found out once: at the instant no file is read."""
        self._said: set[str] = set()

    def asker(self, wanted: Roots | None) -> Callable[[Manifest], Asked] | None:
        """To be called at the instant; None where no files are wanted."""
        roots = self._wanted if wanted is None else _roots_of(wanted)
        if roots is None:
            return None
        self._socket = self._socket or pair_socket(os.environ)
        return partial(self._ask, roots)

    def _ask(self, roots: tuple[str, ...], manifest: Manifest) -> Asked:
        try:
            question = Cut(
                training=manifest.id,
                repository=self._repository,
                time_ns=manifest.time_ns,
                message=manifest.message,
                roots=roots,
                hold_reason=manifest.hold_reason,
            )
            connection = ask(self._socket, question)
        except (CiuicError, OSError) as error:
            return Asked(Asking(problem=str(error)))
        return Asked(Asking(by_seconds=time.monotonic() + ANSWER_SECONDS), connection)

    def heard(self, saved: Saved) -> None:
        """What the writer was answered."""
        if saved.pair is None:
            return
        self._stats.last_filesystem_id, self._stats.last_filesystem_error = saved.pair.id, saved.pair.problem
        if saved.pair.id:
            self._stats.filesystem += 1
        else:
            self._stats.filesystem_failed += 1
            self._say(
                f"there is no snapshot of the files with {saved.id}: {saved.pair.problem}", saved.pair.problem
            )
        if saved.pair_note:
            self._say(saved.pair_note, saved.pair_note)

    def _say(self, text: str, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            log.warning("ciuic: %s", text)


def planned_id() -> str:
    """For a snapshot whose id must be known before it is made."""
    return f"cs-{os.urandom(_ID_BYTES).hex()}"


class Answer:
    """The writer's side: what came, waited for once, as long as there is a point in it."""

    def __init__(self, asking: Asking | None, fd: int | None) -> None:
        """``asking`` None: nothing was asked for."""
        self._asking = asking
        self._connection = None if fd is None else socket.socket(fileno=fd)
        self._pair: Pair | None = None
        self.note = ""

    def pair(self) -> Pair | None:
        """None where nothing was asked for."""
        if self._pair is None and self._asking is not None:
            self._pair = self._wait(self._asking)
        return self._pair

    def _wait(self, asking: Asking) -> Pair:
        problem = asking.problem
        if self._connection is not None:
            try:
                taken = answer(self._connection, asking.by_seconds - time.monotonic())
                if isinstance(taken, Taken):
                    self.note = taken.note
                    return Pair(
                        of="filesystem",
                        id=taken.id,
                        repository=taken.repository,
                        time_ns=taken.time_ns,
                        roots=taken.roots,
                    )
            except CiuicError as error:
                problem = f"{error.message} ({error.hint})" if error.hint else error.message
        return Pair(of="filesystem", problem=problem or "the daemon's answer cannot be read")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _roots_of(wanted: Roots) -> tuple[str, ...] | None:
    if isinstance(wanted, bool):
        return () if wanted else None
    if isinstance(wanted, (str, os.PathLike)):
        raise ValueError("filesystem= is True, False or a list of directories")
    roots = tuple(text_of(os.path.abspath(os.fspath(root))) for root in wanted)
    return roots or None

"""Paired snapshots of the files: requested by the trainer at its step boundary, answered to the writer.

Guarantees: the training waits for none of it. One connection is opened and one message sent, without
blocking, before the state is copied; the writer has the answer by the time it commits, or commits without.
Whatever the daemon does or refuses, the training's snapshot is made, and records what became of the other
half.

References:
    docs/decisions/pairs.md; ciuic.protocol.pairing
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
from ciuic.printable import path_text
from ciuic.protocol.pairing import ANSWER_SECONDS, Cut, Taken, answer, ask, pair_socket
from ciuic.training.writer.messages import Asking, Manifest
from ciuic.types import Pair

Roots = bool | Iterable[str | os.PathLike[str]]
"""Directories whose files are wanted; True for all that this user may have snapshots of."""
# Random bytes of a planned id. It is chosen without a look at existing ids; if it is taken, the writer
# chooses another.
_ID_BYTES: Final = 4


class PairRequest:
    """Request that was sent, and the connection over which the answer comes, if one does."""

    def __init__(self, asking: Asking, connection: socket.socket | None = None) -> None:
        self.asking = asking
        self._connection = connection

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptor of the connection, for the writer."""
        return () if self._connection is None else (self._connection.fileno(),)

    def close(self) -> None:
        """Close this process's end of the connection."""
        if self._connection is not None:
            self._connection.close()


class FilesystemPairing:
    """Requests of one manager for snapshots of the files."""

    def __init__(self, wanted: Roots, save_dir: Path) -> None:
        """Prepare requests.

        Args:
            wanted: directories for snapshots that do not say otherwise.
            save_dir: repository of the training.

        Raises:
            ValueError: `wanted` is a single path.
        """
        self._wanted = _roots_of(wanted)
        self._repository = path_text(os.path.realpath(save_dir))
        self._socket = "" if self._wanted is None else pair_socket(os.environ)
        """Path of the daemon's socket, found once: no file is read at the instant of a snapshot."""

    def requester(self, wanted: Roots | None) -> Callable[[Manifest], PairRequest] | None:
        """Return the function to call at the instant of the snapshot; None if no files are wanted."""
        roots = self._wanted if wanted is None else _roots_of(wanted)
        if roots is None:
            return None
        # Looked up again where the first look found none.
        self._socket = self._socket or pair_socket(os.environ)
        return partial(self._ask, roots)

    def _ask(self, roots: tuple[str, ...], manifest: Manifest) -> PairRequest:
        try:
            question = Cut(
                training=manifest.id,
                repository=self._repository,
                time_ns=manifest.time_ns,
                message=manifest.message,
                roots=roots,
                hold_reason=manifest.hold_reason,
            )
            # Does not block (0.07 ms in the median). The trainer asks and not the writer: a writer busy with
            # the save before would ask minutes later.
            connection = ask(self._socket, question)
        except (CiuicError, OSError) as error:
            # The state is saved all the same, and says why it is alone.
            return PairRequest(Asking(problem=str(error)))
        return PairRequest(Asking(by_seconds=time.monotonic() + ANSWER_SECONDS), connection)


def planned_id() -> str:
    """Return an id for a snapshot whose id must be known before it is made."""
    return f"cs-{os.urandom(_ID_BYTES).hex()}"


class PairAnswer:
    """Answer of the daemon, read by the writer once, before the deadline of the request."""

    def __init__(self, asking: Asking | None, fd: int | None) -> None:
        """Take over the connection.

        Args:
            asking: the request; None if there was none.
            fd: descriptor of the connection, if there is one.
        """
        self._asking = asking
        self._connection = None if fd is None else socket.socket(fileno=fd)
        self._pair: Pair | None = None
        self.note = ""

    def pair(self) -> Pair | None:
        """Wait for the answer and return the record of the other half; None if nothing was requested."""
        # Once: a commit that is tried again after a full disk asks for the answer again.
        if self._pair is None and self._asking is not None:
            self._pair = self._wait(self._asking)
        return self._pair

    def _wait(self, asking: Asking) -> Pair:
        problem = asking.problem
        if self._connection is not None:
            try:
                # Bounded by the time of the request, not of this call: the monotonic clock is the same in
                # both processes.
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
        """Close the connection to the daemon; an answer that has not come is not waited for."""
        if self._connection is not None:
            self._connection.close()


def _roots_of(wanted: Roots) -> tuple[str, ...] | None:
    if isinstance(wanted, bool):
        # Without a root the daemon takes all that this user may have snapshots of.
        return () if wanted else None
    # A string is a sequence too: its letters would be taken for directories.
    if isinstance(wanted, (str, os.PathLike)):
        raise ValueError(f"filesystem must be True, False or a list of directories, got {wanted!r}")
    roots = tuple(path_text(os.path.abspath(os.fspath(root))) for root in wanted)
    return roots or None

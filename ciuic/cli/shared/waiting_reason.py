"""Reason why a snapshot takes long, for a command that waits for it without showing progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ciuic.protocol.control_types import SnapshotState

_AFTER_SECONDS: Final = 30.0


@contextmanager
def telling_why(socket_path: str, *, after_seconds: float = _AFTER_SECONDS) -> Iterator[None]:
    """Print one line to stderr if the block takes long because captures make way for other programs."""
    # Not at the top: most snapshots wait for nothing.
    import threading

    timer = threading.Timer(after_seconds, _tell, [socket_path])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(socket_path: str) -> None:
    from ciuic.cli.shared.messages import complain
    from ciuic.errors import CiuicError
    from ciuic.protocol.control import ControlClient

    # What waits for the answer says what is wrong with the daemon.
    with suppress(CiuicError, OSError), ControlClient(socket_path) as client:
        for state in client.status().captures:
            reason = reason_of(state)
            if reason:
                complain(f"{state.id} takes long: {reason}")
                return


def reason_of(state: SnapshotState) -> str:
    """Return why a capture is slower than it could be; empty where it is not."""
    done = state.progress
    if done is None or done.share >= 1:
        return ""
    return (
        f"it makes way for other programs that use the disk ({done.share:.0%} of the time, capture.min_share)"
    )

"""Options of ``ciuic snapshot`` in one table, and the reason why a snapshot takes long, for both programs of that command.

One program parses with click; fast_snapshot.py imports no click, and this module imports nothing but the standard library before
it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ciuic.protocol.control_types import SnapshotState


class SnapshotOption(NamedTuple):
    """One option. ``field`` is the parameter of the command and the field of the request."""

    names: tuple[str, ...]
    field: str
    help: str
    metavar: str = ""
    """Name of the value in help texts; empty for a flag."""
    repeats: bool = False
    values: tuple[str, ...] = ()
    """Values that a flag may be given, as in ``--wait=remote``; the first stands for the flag alone."""

    @property
    def is_flag(self) -> bool:
        """Return True if the option takes no value."""
        return not self.metavar


OPTIONS: Final = (
    SnapshotOption(("-m", "--message"), "message", "What this snapshot is for.", metavar="TEXT"),
    SnapshotOption(("--tag",), "tags", "A tag; may be given several times.", metavar="TAG", repeats=True),
    SnapshotOption(("--hold",), "hold", "Never prune it (see `ciuic release`)."),
    SnapshotOption(
        ("--wait",),
        "wait",
        "Return when it is committed, not already when it is cut; --wait=remote: when all remotes have it.",
        values=("commit", "remote"),
    ),
)
# As in ciuic.types, whose import takes longer than the request; a test compares them.
RESERVED_TAGS: Final = frozenset({"incomplete", "not-held", "partial", "retaken", "safety"})
"""Tags that ciuic gives snapshots itself, with a meaning that restores and retention rely on."""
BY_NAME: Final = {name: option for option in OPTIONS for name in option.names}


_AFTER_SECONDS: Final = 30.0


@contextmanager
def telling_why(socket_path: str, *, after_seconds: float = _AFTER_SECONDS) -> Iterator[None]:
    """Print one line to stderr if the block takes long because captures make way for other programs."""
    # Not at the top: most snapshots wait for nothing.
    from functools import partial

    from ciuic.cli.shared.slow import if_slow

    with if_slow(partial(_tell, socket_path), after_seconds):
        yield


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

"""Restores that the screen asks for: the functions of ``ciuic restore``, with its plan and its messages as lines.

Guarantees: nothing is changed but by `restored` and `copied`; a copy never overwrites, and takes no safety snapshot, as it makes one new file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ciuic.cli.commands.restore import carry_out, planned, words_again
from ciuic.cli.shared.messages import lines_to
from ciuic.cli.shared.progress import LineReporter, Reporter, reported_by
from ciuic.cli.shared.session import Session
from ciuic.errors import CiuicError
from ciuic.types import SnapshotId

_REPORT_SECONDS: Final = 0.1


class Order(NamedTuple):
    """Source and destination of a restore."""

    snapshot: SnapshotId
    path: bytes
    dest: bytes | None
    """Directory that gets it; None to put it in its place, over what is there."""

    @property
    def options(self) -> list[str]:
        """Options of the command beside the snapshot, the path and the directory."""
        return ["--overwrite=always"] if self.dest is None else []

    def words(self) -> list[str | bytes]:
        """Return the words of the command that does the same, from the name of the command on."""
        beside: list[str | bytes] = [] if self.dest is None else ["-d", self.dest]
        return ["restore", "-s", str(self.snapshot), "-p", self.path, *beside, *self.options]


class Done(NamedTuple):
    """End of a restore, or of its plan."""

    code: int


class ProgressLine(LineReporter):
    """Reporter that hands its line on."""

    def __init__(self, task: str, take: Callable[[LineReporter, float], None]) -> None:
        super().__init__(task, _REPORT_SECONDS)
        self._take = take

    def show(self, elapsed_seconds: float) -> None:
        """Hand the line on."""
        self._take(self, elapsed_seconds)


def plan(session: Session, order: Order) -> Iterator[str | Done]:
    """Yield what ``ciuic restore --plan`` prints, and its exit code."""
    yield from _restored(session, order, dry_run=True, no_safety=False)


def restored(session: Session, order: Order, report: Callable[[str], Reporter]) -> Iterator[str | Done]:
    """Restore, and yield what the command prints at the end, and its exit code."""
    with reported_by(report):
        parts = list(_restored(session, order, dry_run=False, no_safety=False))
    yield from parts


def copied(session: Session, order: Order) -> Iterator[str | Done]:
    """Copy a file out into a directory, where nothing has its name."""
    yield from _restored(session, order, dry_run=False, no_safety=True)


def _restored(session: Session, order: Order, *, dry_run: bool, no_safety: bool) -> Iterator[str | Done]:
    lines: list[str] = []
    code = 0
    failure: CiuicError | OSError | None = None
    with lines_to(lines.append):
        try:
            made = planned(
                session,
                str(order.snapshot),
                [order.path],
                order.dest,
                "always" if order.dest is None else None,
                delete=False,
                dry_run=dry_run,
                special=None,
                include=(),
                exclude=(),
            )
            code = carry_out(
                session,
                made,
                dry_run=dry_run,
                no_safety=no_safety,
                as_json=False,
                again=words_again(made, order.dest, order.options),
            )
        # Told behind what was printed before it.
        except (CiuicError, OSError) as error:
            failure = error
    for text in lines:
        yield from text.split("\n")
    if failure is not None:
        raise failure
    yield Done(code)

"""The options of ``ciuic snapshot``, in one table for its two parsers: click's, and the one of fast_snapshot.py that imports no click."""

from __future__ import annotations

from typing import Final, NamedTuple


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

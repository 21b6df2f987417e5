"""``ciuic remote tier``: move old data to colder storage classes, by the rules of the configuration.

Guarantees: names, trees and logs stay readable at once; killed at any moment, the next run goes on; uploads go on meanwhile.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import plural
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import UsageError
from ciuic.units import human_size

if TYPE_CHECKING:
    from ciuic.remote.upkeep.cold_packs import PlannedMoves

_GB = 10**9
_SHOWN_REASONS = 3


@click.command("tier", cls=FrameCommand)
@targets.place_argument
@click.option("--dry-run", is_flag=True, help="Say what would move; only read.")
@json_option
def tier(place: str, dry_run: bool, as_json: bool) -> None:
    """Move data that only old snapshots need to colder storage classes.

    The rules are [[remote.tier]] of the configuration. Run it from a timer, on one host. Stores charge for each move, and for a
    minimum duration in the colder class.
    """
    from ciuic.cli.shared.cold_packs import open_session_classes
    from ciuic.cli.shared.progress import progress
    from ciuic.remote.upkeep.cold_packs import apply_rules, classes_of_spaces

    session = current()
    config = targets.find_remote(session.config, place)
    if not config.tiers:
        raise UsageError(
            f"the remote {config.name} has no rule",
            hint='[[remote.tier]] with after = "30d" and storage_class = "GLACIER_IR"',
        )
    session.repo_option, session.remote_option = None, config.url
    classes = open_session_classes(session, config.url)
    opened = session.remote
    with progress("tier") as reporter:
        marked = 0

        def between() -> None:
            nonlocal marked
            marked += 1
            reporter.step("mark", marked, 0)

        spaces = apply_rules(
            classes_of_spaces(opened, classes),
            config.tiers,
            session.now_ns,
            host=socket.gethostname(),
            dry_run=dry_run,
            between=between,
        )
    if as_json:
        out_json(_document(config.url, dry_run, spaces, config.price.gb_month))
    else:
        _print(dry_run, spaces, config.price.gb_month)


def _document(
    url: str, dry_run: bool, spaces: Sequence[PlannedMoves], gb_month: float | None
) -> dict[str, Any]:
    moved = sum(space.bytes for space in spaces)
    return {
        "remote": url,
        "dry_run": dry_run,
        "packs": sum(len(space.moves) for space in spaces),
        "bytes": moved,
        "month_before": None if gb_month is None else moved / _GB * gb_month,
        "spaces": [
            {
                "id": space.space,
                "moves": dict(sorted(space.moves.items())),
                "bytes": space.bytes,
                "skipped": dict(sorted(space.skipped.items())),
            }
            for space in spaces
        ],
    }


def _print(dry_run: bool, spaces: Sequence[PlannedMoves], gb_month: float | None) -> None:
    packs: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for space in spaces:
        for ref, storage_class in space.moves.items():
            packs[storage_class] += 1
            sizes[storage_class] += space.sizes.get(ref, 0)
    verb = "would move" if dry_run else "moved"
    for storage_class in sorted(packs):
        out(
            f"{plural(packs[storage_class], 'pack')}, {human_size(sizes[storage_class])}, {verb} to {storage_class}"
        )
    if not packs:
        out("nothing moves" if dry_run else "nothing moved")
    elif gb_month is not None:
        out(
            f"until now {sum(sizes.values()) / _GB * gb_month:.2f} a month, at the configured price of the warm class"
        )
    skipped = Counter(reason for space in spaces for reason in space.skipped.values())
    for reason, count in skipped.most_common(_SHOWN_REASONS):
        warn(f"{plural(count, 'pack')} did not move: {reason}")

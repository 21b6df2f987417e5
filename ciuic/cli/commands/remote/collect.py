"""``ciuic prune --remote``: free the space of a remote that no snapshot needs.

Guarantees: uploaders of all hosts may run meanwhile; interrupted anywhere, the next run of any host goes on.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import plural
from ciuic.cli.shared.output import note, out_json, out_prose
from ciuic.cli.shared.session import Session
from ciuic.errors import Damaged

if TYPE_CHECKING:
    from ciuic.remote.upkeep.collect import CollectedSpace


def prune_remote(session: Session, *, dry_run: bool, spare_cold: int, as_json: bool) -> None:
    """Collect the remote that the session reads, and print the result.

    Args:
        session: The session.
        dry_run: Only say what would be done.
        spare_cold: Seconds since when packs that became cold are spared.
        as_json: Print a document.
    """
    from ciuic.cli.shared.progress import progress
    from ciuic.remote.upkeep.collect import collect_remote, preview_collection
    from ciuic.remote.upkeep.collector import DEFAULT_POLICY

    # Opened here: the question for a passphrase would stand in the middle of a progress line.
    opened = session.remote
    policy = DEFAULT_POLICY._replace(spare_cold_ns=spare_cold * 10**9)
    spaces: list[CollectedSpace] = []
    refused: Damaged | None = None
    with progress("prune") as reporter:
        marked = 0

        def between() -> None:
            nonlocal marked
            marked += 1
            reporter.step("mark", marked, 0)

        try:
            if dry_run:
                preview_collection(
                    opened, now_ns=session.now_ns, policy=policy, between=between, collected=spaces.append
                )
            else:
                collect_remote(
                    opened,
                    host=socket.gethostname(),
                    policy=policy,
                    between=between,
                    collected=spaces.append,
                )
        except Damaged as error:
            refused = error
    if refused is not None and not spaces:
        raise refused
    if as_json:
        out_json(_document(opened.remote.objects.url, dry_run, spaces))
    else:
        _print(dry_run, spaces)
    if refused is not None:
        # After what was done elsewhere.
        raise refused


def _document(url: str, dry_run: bool, spaces: list[CollectedSpace]) -> dict[str, Any]:
    return {
        "remote": url,
        "dry_run": dry_run,
        "freed_bytes": sum(space.freed_bytes for space in spaces),
        "spaces": [
            {
                "id": space.id,
                "packs": list(space.packs),
                "manifests": list(space.manifests),
                "freed_bytes": space.freed_bytes,
                "repacked_bytes": space.repacked_bytes,
                "rescued": space.rescued,
                "cold_packs": list(space.cold),
                "unreadable_packs": list(space.unreadable),
                "decayed_packs": list(space.decayed),
                "checked_bytes": space.checked_bytes,
                "unfinished_round": space.unfinished,
            }
            for space in spaces
        ],
    }


def _print(dry_run: bool, spaces: list[CollectedSpace]) -> None:
    from ciuic.units import human_size

    packs = sum(len(space.packs) for space in spaces)
    manifests = sum(len(space.manifests) for space in spaces)
    copied = sum(space.repacked_bytes for space in spaces)
    gone, freed = ("would be deleted", "would be freed") if dry_run else ("deleted", "freed")
    line = f"{plural(packs, 'pack')} and {plural(manifests, 'manifest')} {gone}"
    line += f", {human_size(sum(space.freed_bytes for space in spaces))} {freed}"
    if copied:
        line += f"; {human_size(copied)} {'would be' if dry_run else 'were'} copied from mostly dead packs"
    out_prose(line, 2)
    if any(space.unfinished for space in spaces):
        note("a collection is under way or was interrupted: ciuic prune --remote ends it first")
    cold = sum(len(space.cold) for space in spaces)
    if cold:
        verb = "would be" if dry_run else "were"
        note(
            f"{cold} of these packs {verb} cold: stores charge for the rest of the class's minimum duration; "
            "--spare-cold 180d leaves younger ones"
        )
    decayed = sum(len(space.decayed) for space in spaces)
    if decayed:
        warn(
            f"{plural(decayed, 'pack')} cannot be read in part; other copies of what is needed stay",
            hint="ciuic check --remote --repair --read-data",
        )
    unreadable = sum(len(space.unreadable) for space in spaces)
    if unreadable:
        warn(
            f"{plural(unreadable, 'pack')} cannot be read, and stay{'s' if unreadable == 1 else ''}",
            hint="ciuic check --remote says why",
        )

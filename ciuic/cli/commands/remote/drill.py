"""``ciuic remote drill``: would a rescue from the remote work, and how long would it take?

Guarantees: what is restored comes from the remote alone, through an empty cache; the repository of this host is only asked, at
the end, whether it knows the snapshot as the remote does. Restored files are removed again. The outcome is noted for ``remote
status`` and the metrics, also where the drill fails.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared import drills
from ciuic.cli.shared.drills import say
from ciuic.cli.shared.messages import complain, shown_text, warn
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, Damaged, NotFound, UsageError

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.protocol.last_drill import LastDrill
    from ciuic.remote.reading.opening import ReadableRemote
    from ciuic.types import Snapshot


@click.command("drill", cls=FrameCommand)
@targets.place_argument
@drills.sample_options
@click.option(
    "--snapshot", "id_", metavar="ID", help="Snapshot to restore from; default: the newest of this host."
)
@json_option
def drill(
    place: str, sample: str | None, id_: str | None, seed: int | None, scratch: Path | None, as_json: bool
) -> int:
    """Prove that a rescue from a remote works: restore a sample of its newest snapshot, and compare it.

    Without REMOTE, each remote of the configuration. The newest checkpoint is restored whole, other files are chosen at random.
    Exit 4 on damage, 1 if the store does not answer.
    """
    session = current()
    sample_bytes = drills.sample_bytes(sample)
    chosen = targets.find_remotes(session.config, place)
    if id_ is not None and len(chosen) > 1:
        raise UsageError("--snapshot goes with one remote: name it", hint="ciuic remote drill REMOTE")
    seed = drills.new_seed() if seed is None else seed
    documents: list[dict[str, Any]] = []
    failures: list[CiuicError] = []
    for config in chosen:
        try:
            document = _drilled(session, config, scratch, id_, seed, sample_bytes)
        except CiuicError as error:
            failures.append(error)
            document = {
                "remote": config.name,
                "url": config.url,
                "verdict": "failed",
                "seed": seed,
                "error": error.message,
                "hint": error.hint,
            }
        documents.append(document)
        if not as_json:
            _print(document, is_first=len(documents) == 1)
    if as_json:
        out_json({"drills": documents})
    if any(document["verdict"] == "damaged" for document in documents):
        for failure in failures:
            complain(shown_text(failure.message))
        return Damaged.exit_code
    if failures:
        raise failures[0]
    return 0


def _drilled(
    session: Session,
    config: RemoteConfig,
    scratch: Path | None,
    id_: str | None,
    seed: int,
    sample_bytes: int,
) -> dict[str, Any]:
    """Drill one remote, note the outcome, and return its document."""
    from ciuic.maintenance.drill import failed_outcome

    began = time.monotonic()
    try:
        document = _drill(session, config, scratch, id_, seed, sample_bytes, began)
    except UsageError:
        # The drill did not begin.
        raise
    except CiuicError as error:
        _note(session, config, failed_outcome(error, time.monotonic() - began))
        raise
    _note(session, config, drills.outcome(document, document["seconds"]))
    return document


def _drill(
    session: Session,
    config: RemoteConfig,
    scratch: Path | None,
    id_: str | None,
    seed: int,
    sample_bytes: int,
    began: float,
) -> dict[str, Any]:
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.drill import run_drill, scratch_directory
    from ciuic.remote.access import configured_objects
    from ciuic.remote.reading.opening import read_remote

    with scratch_directory(drills.scratch_parent(scratch)) as place:
        objects = configured_objects(config)
        try:
            remote = targets.opened(config, objects)
            opened = read_remote(remote, cache_root=place / "cache")
        except BaseException:
            objects.close()
            raise
        try:
            with opened, progress("drill") as reporter:
                snapshot = _snapshot(session, opened, id_)
                open_seconds = time.monotonic() - began
                result = run_drill(
                    opened.repository_of([snapshot.id]),
                    snapshot,
                    place,
                    seed=seed,
                    sample_bytes=sample_bytes,
                    patterns=session.checkpoint_patterns,
                    progress=lambda done, total: reporter.update(bytes_done=done, bytes_total=total),
                )
                local = _local(session, opened, snapshot)
                damage = [(os.fsencode(one.name), one.reason) for one in opened.log_damage]
                # Of other repositories: this one can be rescued.
                session.say_damaged(opened.lost_spaces)
        finally:
            objects.close()
    if local is False:
        damage.append((b"/", "the repository of this host has other trees in this snapshot than the remote"))
    document = drills.result_document(session, snapshot, result, damage)
    return {
        "remote": config.name,
        "url": config.url,
        **document,
        "open_seconds": open_seconds,
        "seconds": time.monotonic() - began,
        "estimated_seconds": open_seconds + document["estimated_seconds"],
        "same_as_local": local,
    }


def _snapshot(session: Session, opened: ReadableRemote, text: str | None) -> Snapshot:
    """Return the snapshot to restore from."""
    host = session.as_host or socket.gethostname()
    if text is not None:
        return opened.snapshots.load(opened.snapshots.resolve(text))
    try:
        found = opened.of_host(host).snapshots.list(limit=1, safety=False)
    except NotFound as error:
        if opened.lost_spaces:
            raise opened.lost_spaces[0] from error
        # Exit code 3 says to a timer that there is no remote.
        raise CiuicError(f"nothing could be rescued: {error.message}", hint=error.hint) from error
    if not found:
        raise Damaged(
            f"no snapshot of {host} in the remote can be read",
            hint="ciuic check --remote names what is damaged",
        )
    return opened.snapshots.load(found[0].id)


def _local(session: Session, opened: ReadableRemote, snapshot: Snapshot) -> bool | None:
    """Return whether this host's repository has the snapshot with the same trees; None if it does not have it."""
    live = opened.snapshots.entries[snapshot.id].live
    try:
        repository = session.repository
        if repository.id != live.repository:
            return None
        here = repository.snapshots.load(type(snapshot.id)(live.snapshot))
    except CiuicError:
        # Lost, pruned or damaged here: of the remote this says nothing.
        return None
    return _trees(here) == _trees(snapshot)


def _trees(snapshot: Snapshot) -> list[tuple[bytes, bytes, bytes]]:
    return [(root.path, root.entry.content, root.links) for root in snapshot.roots]


def _note(session: Session, config: RemoteConfig, drill: LastDrill) -> None:
    """Keep the outcome for the status and the metrics, if the remote is one of the configuration."""
    from ciuic.protocol.last_drill import write_last_drill
    from ciuic.protocol.stored_remotely import upload_state_dir

    if config not in session.config.remotes:
        return
    place = upload_state_dir()
    try:
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_last_drill(config.name, drill, place)
    except OSError as error:
        warn(
            f"the outcome could not be noted below {shown_text(str(place))}: {error.strerror}",
            hint="run it as root, or as ciuic-drill.service: ciuic remote status shows it then",
        )


def _print(document: dict[str, Any], *, is_first: bool) -> None:
    if not is_first:
        out()
    say(f"remote     {document['remote']}: {document['url']}")
    if document["verdict"] == "failed":
        say(f"verdict    failed: {shown_text(document['error'])}", fg="red")
        return
    drills.print_result(document)
    drills.print_verdicts(document)
    if document["same_as_local"]:
        say("local      the repository of this host has the same trees")
    drills.print_damages(document)
    if document["damages"]:
        say("verdict    DAMAGED: ciuic check --remote --read-data says how far it goes", fg="red")
    else:
        say("verdict    good: what was restored is what the snapshot has", fg="green")

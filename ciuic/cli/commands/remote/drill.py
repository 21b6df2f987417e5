"""``ciuic remote drill``: would a rescue from the remote work, and how long would it take?

Guarantees: what is restored comes from the remote alone, through an empty cache; the repository of this host is only asked, at
the end, whether it knows the snapshot as the remote does. Restored files are removed again. The outcome is noted for ``remote
status`` and the metrics, also where the drill fails.
"""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared import times
from ciuic.cli.shared.messages import complain, json_name, plural, shown_text, warn
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json, out_prose
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, Damaged, NotFound, UsageError
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ciuic.config import RemoteConfig
    from ciuic.protocol.last_drill import LastDrill
    from ciuic.remote.reading.opening import ReadableRemote
    from ciuic.remote.upkeep.drill import DrillResult
    from ciuic.types import Snapshot

_LABEL_WIDTH = 11
_SHOWN_DAMAGES = 20
_MAX_SEED = 1 << 32


@click.command("drill", cls=FrameCommand)
@targets.place_argument
@click.option(
    "--sample",
    metavar="SIZE",
    help="Limit of the files that are chosen at random, at most 1,000 of them; default: 1GiB.",
)
@click.option(
    "--snapshot", "id_", metavar="ID", help="Snapshot to restore from; default: the newest of this host."
)
@click.option(
    "--seed",
    type=click.IntRange(0, _MAX_SEED - 1),
    help="Choose the same files again as the drill that printed it.",
)
@click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Where files are restored, and removed again; default: TMPDIR, or /var/tmp.",
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
    sample_bytes = _size(sample)
    chosen = targets.find_remotes(session.config, place)
    if id_ is not None and len(chosen) > 1:
        raise UsageError("--snapshot goes with one remote: name it", hint="ciuic remote drill REMOTE")
    seed = random.SystemRandom().randrange(_MAX_SEED) if seed is None else seed
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


def _size(text: str | None) -> int:
    from ciuic.remote.upkeep.drill import DEFAULT_SAMPLE_BYTES
    from ciuic.units import parse_size

    try:
        return DEFAULT_SAMPLE_BYTES if text is None else parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"--sample: {error}") from error


def _drilled(
    session: Session,
    config: RemoteConfig,
    scratch: Path | None,
    id_: str | None,
    seed: int,
    sample_bytes: int,
) -> dict[str, Any]:
    """Drill one remote, note the outcome, and return its document."""
    from ciuic.protocol.last_drill import LastDrill

    began = time.monotonic()
    try:
        document = _drill(session, config, scratch, id_, seed, sample_bytes, began)
    except UsageError:
        # The drill did not begin.
        raise
    except CiuicError as error:
        verdict = "damaged" if isinstance(error, Damaged) else "failed"
        _note(
            session,
            config,
            LastDrill(
                time_ns=time.time_ns(),
                verdict=verdict,  # type: ignore[arg-type]
                seconds=time.monotonic() - began,
                reason=error.message,
            ),
        )
        raise
    damages = document["damages"]
    _note(
        session,
        config,
        LastDrill(
            time_ns=time.time_ns(),
            verdict=document["verdict"],
            seconds=document["seconds"],
            reason=f"{damages[0]['path']}: {damages[0]['reason']}" if damages else "",
            snapshot=document["snapshot"],
            files=document["files"],
            bytes_read=document["bytes_read"],
            estimated_seconds=document["estimated_seconds"],
        ),
    )
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
    from ciuic.remote.access import configured_objects
    from ciuic.remote.reading.opening import read_remote
    from ciuic.remote.upkeep.drill import run_drill, scratch_directory

    # Not the usual place for temporary files, which often is in memory.
    parent = scratch or Path(os.environ.get("TMPDIR") or "/var/tmp")
    with scratch_directory(parent.absolute()) as place:
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
                    progress=lambda done, total: reporter.update(bytes_done=done, bytes_total=total),
                )
                local = _local(session, opened, snapshot)
                log_damage = [(os.fsencode(one.name), one.reason) for one in opened.log_damage]
        finally:
            objects.close()
    return _document(config, session, snapshot, result, local, log_damage, began, open_seconds)


def _snapshot(session: Session, opened: ReadableRemote, text: str | None) -> Snapshot:
    """Return the snapshot to restore from."""
    host = session.as_host or socket.gethostname()
    if text is not None:
        return opened.snapshots.load(opened.snapshots.resolve(text))
    try:
        found = opened.of_host(host).snapshots.list(limit=1, safety=False)
    except NotFound as error:
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


def _document(
    config: RemoteConfig,
    session: Session,
    snapshot: Snapshot,
    result: DrillResult,
    is_same: bool | None,
    damages: Sequence[tuple[bytes, str]],
    began: float,
    open_seconds: float,
) -> dict[str, Any]:
    found = [*((one.path, one.reason) for one in result.damages), *damages]
    if is_same is False:
        found.append((b"/", "the repository of this host has other trees in this snapshot than the remote"))
    return {
        "remote": config.name,
        "url": config.url,
        "verdict": "damaged" if found else "good",
        "snapshot": str(snapshot.id),
        "host": snapshot.host,
        "time": times.rfc3339(snapshot.time_ns),
        "age_seconds": max(0.0, (session.now_ns - snapshot.time_ns) / 1e9),
        "seed": result.seed,
        **(json_name("checkpoint", result.checkpoint) if result.checkpoint else {"checkpoint": None}),
        "files": result.files,
        "bytes_read": result.bytes_read,
        "files_total": result.files_total,
        "bytes_total": result.bytes_total,
        "open_seconds": open_seconds,
        "restore_seconds": result.seconds,
        "seconds": time.monotonic() - began,
        "bytes_per_second": result.bytes_per_second,
        "estimated_seconds": open_seconds + result.estimated_seconds,
        "same_as_local": is_same,
        "damages": [{**json_name("path", path), "reason": reason} for path, reason in found],
    }


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


def _say(text: str, **style: Any) -> None:
    out_prose(text, _LABEL_WIDTH, **style)


def _print(document: dict[str, Any], *, is_first: bool) -> None:
    if not is_first:
        out()
    _say(f"remote     {document['remote']}: {document['url']}")
    if document["verdict"] == "failed":
        _say(f"verdict    failed: {shown_text(document['error'])}", fg="red")
        return
    age = human_duration(document["age_seconds"])
    _say(
        f"snapshot   {document['snapshot']} of {shown_text(document['host'])}, "
        f"{times.clock_of(document['time'])}, {age} old"
    )
    if document["checkpoint"]:
        _say(f"checkpoint {shown_text(document['checkpoint'])}, restored whole")
    _say(
        f"restored   {document['files']} of {plural(document['files_total'], 'file')}, "
        f"{human_size(document['bytes_read'])} of {human_size(document['bytes_total'])}, "
        f"in {document['restore_seconds']:.1f} s, {human_size(document['bytes_per_second'])}/s; seed {document['seed']}"
    )
    _say(f"estimate   about {human_duration(document['estimated_seconds'])} for a restore of everything")
    if document["same_as_local"]:
        _say("local      the repository of this host has the same trees")
    damages = document["damages"]
    for damage in damages[:_SHOWN_DAMAGES]:
        _say(f"damaged    {shown_text(damage['path'])}: {shown_text(damage['reason'])}", fg="red")
    if len(damages) > _SHOWN_DAMAGES:
        note(f"and {len(damages) - _SHOWN_DAMAGES} more; --json lists them all")
    if damages:
        _say("verdict    DAMAGED: ciuic check --remote --read-data says how far it goes", fg="red")
    else:
        _say("verdict    good: what was restored is what the snapshot has", fg="green")

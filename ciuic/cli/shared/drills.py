"""Parts of `ciuic drill` and `ciuic remote drill`: options, the document of a result, its lines, and the record of its outcome."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown_text
from ciuic.cli.shared.output import note, out_prose
from ciuic.errors import UsageError
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session
    from ciuic.maintenance.drill import DrillResult
    from ciuic.protocol.last_drill import LastDrill
    from ciuic.types import Snapshot

_DAMAGE: Final = Keys("path, reason")
_VERDICT: Final = Keys("path, verdict, reason, format")
_RESULT: Final = Keys(
    "verdict (`good`, `damaged`), snapshot, host, time, age_seconds, seed, checkpoint|null, files, bytes_read, files_total, bytes_total,"
    " restore_seconds, bytes_per_second, estimated_seconds, verdicts, damages",
    "each of the `drills` of `drill`, `remote drill` and `fleet drill`",
    verdicts=_VERDICT,
    damages=_DAMAGE,
)
_LABEL_WIDTH: Final = 11
_SHOWN_LINES: Final = 20
_MAX_SEED: Final = 1 << 32
_F = TypeVar("_F", bound=Callable[..., Any])


def sample_options(command: _F) -> _F:
    """Add --sample, --seed and --scratch."""
    for add in (
        click.option(
            "--scratch",
            metavar="DIR",
            type=click.Path(file_okay=False, exists=True, path_type=Path),
            help="Where files are restored, and removed again; default: TMPDIR, or /var/tmp.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, _MAX_SEED - 1),
            help="Choose the same files again as the drill that printed it.",
        ),
        click.option(
            "--sample",
            metavar="SIZE",
            help="Limit of the files that are chosen at random, at most 1,000 of them; default: 1GiB.",
        ),
    ):
        command = add(command)
    return command


def sample_bytes(text: str | None) -> int:
    """Return the size that --sample names; UsageError for anything else."""
    from ciuic.maintenance.drill import DEFAULT_SAMPLE_BYTES
    from ciuic.units import parse_size

    try:
        return DEFAULT_SAMPLE_BYTES if text is None else parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"--sample: {error}") from error


def new_seed() -> int:
    """Return a seed for a drill that was given none."""
    return random.SystemRandom().randrange(_MAX_SEED)


def scratch_parent(scratch: Path | None) -> Path:
    """Return the directory below which a drill restores.

    Raises:
        UsageError: TMPDIR names none.
    """
    # Not the usual place for temporary files, which often is in memory.
    parent = (scratch or Path(os.environ.get("TMPDIR") or "/var/tmp")).absolute()
    if scratch is None and not parent.is_dir():
        raise UsageError(
            f"TMPDIR must name a directory, got {shown_text(str(parent))}",
            hint="make it, or name another with --scratch",
        )
    return parent


def result_document(
    session: Session, snapshot: Snapshot, result: DrillResult, more: Sequence[tuple[bytes, str]] = ()
) -> dict[str, Any]:
    """Return the document of a result (docs/cli.md); ``more`` is damage that was found beside the sample."""
    damages = [*_DAMAGE.all(result.damages), *(_DAMAGE.of(path=path, reason=reason) for path, reason in more)]
    return _RESULT.of(
        result,
        snapshot,
        verdict="damaged" if damages else "good",
        snapshot=snapshot,
        age_seconds=max(0.0, (session.now_ns - snapshot.time_ns) / 1e9),
        restore_seconds=result.seconds,
        verdicts=[_VERDICT.of(one, one.verdict, verdict=one.verdict.state) for one in result.verdicts],
        damages=damages,
    )


def outcome(document: dict[str, Any], seconds: float) -> LastDrill:
    """Return the record of a drill with this document."""
    from ciuic.protocol.last_drill import LastDrill

    damages = document["damages"]
    return LastDrill(
        time_ns=time.time_ns(),
        verdict=document["verdict"],
        seconds=seconds,
        reason=f"{damages[0]['path']}: {damages[0]['reason']}" if damages else document.get("reason", ""),
        snapshot=document["snapshot"],
        files=document["files"],
        bytes_read=document["bytes_read"],
        estimated_seconds=document["estimated_seconds"],
    )


def say(text: str, **style: Any) -> None:
    """Print a line with a label."""
    out_prose(text, _LABEL_WIDTH, **style)


def print_result(document: dict[str, Any]) -> None:
    """Print what was restored, and how long all would take."""
    age = human_duration(document["age_seconds"])
    say(
        f"snapshot   {document['snapshot']} of {shown_text(document['host'])}, "
        f"{times.clock_of(document['time'])}, {age} old"
    )
    if document["checkpoint"]:
        say(f"checkpoint {shown_text(document['checkpoint'])}, restored whole")
    say(
        f"restored   {document['files']} of {plural(document['files_total'], 'file')}, "
        f"{human_size(document['bytes_read'])} of {human_size(document['bytes_total'])}, "
        f"in {document['restore_seconds']:.1f} s, {human_size(document['bytes_per_second'])}/s; seed {document['seed']}"
    )
    say(f"estimate   about {human_duration(document['estimated_seconds'])} for a restore of everything")


def print_verdicts(document: dict[str, Any]) -> None:
    """Print the checkpoints of the sample that are not GOOD, and the number of those that are."""
    verdicts = document["verdicts"]
    others = [one for one in verdicts if one["verdict"] != "GOOD"]
    if verdicts:
        say(f"judged     {plural(len(verdicts), 'checkpoint')}, {len(verdicts) - len(others)} GOOD")
    for one in others[:_SHOWN_LINES]:
        say(f"{one['verdict']:<11}{shown_text(one['path'])}: {shown_text(one['reason'])}", fg="yellow")
    _say_more(others)


def print_damages(document: dict[str, Any]) -> None:
    """Print what did not come back as the snapshot has it."""
    damages = document["damages"]
    for damage in damages[:_SHOWN_LINES]:
        say(f"damaged    {shown_text(damage['path'])}: {shown_text(damage['reason'])}", fg="red")
    _say_more(damages)


def _say_more(items: Sequence[object]) -> None:
    if len(items) > _SHOWN_LINES:
        note(f"and {len(items) - _SHOWN_LINES} more; --json lists them all")

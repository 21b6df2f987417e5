"""The part of ``ciuic status`` that speaks of trainers: who is watched, when each was last heard of, and what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ciuic.cli.shared import times
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.output import out, out_prose
from ciuic.printable import shown_name
from ciuic.units import human_duration

if TYPE_CHECKING:
    from ciuic.protocol.control_types import Incident, StatusDocument, TrainerStatus

# The newest; status --json has those that the daemon keeps.
_MAX_INCIDENTS: Final = 5
_COLOURS: Final = {"running": "green", "hung": "red"}


def print_trainers(status: StatusDocument) -> None:
    """Print the lines about trainers, if there are any."""
    if status.trainers:
        _print_table(status.trainers)
    for incident in status.incidents[:_MAX_INCIDENTS]:
        out_prose(_incident_line(incident), 11, fg="green" if incident.kind == "recovered" else "yellow")


def _print_table(trainers: list[TrainerStatus]) -> None:
    from ciuic.cli.shared.tables import Cell, Column, show_table

    columns = [
        Column("TRAINER", shrink=True),
        Column("PID", right=True),
        Column("USER"),
        Column("STATE"),
        Column("STEP", right=True),
        Column("LAST BEAT"),
        Column("HUNG AFTER", right=True),
    ]
    rows = [
        (
            _name_and_place(trainer),
            str(trainer.pid or "-"),
            shown_text(trainer.user),
            Cell(trainer.state, _COLOURS.get(trainer.state, "yellow")),
            str(trainer.step or "-"),
            times.clock_of(trainer.last_beat) if trainer.last_beat else "-",
            human_duration(trainer.heartbeat_seconds) if trainer.heartbeat_seconds else "never",
        )
        for trainer in trainers
    ]
    out()
    show_table(columns, rows)


def _name_and_place(trainer: TrainerStatus) -> str:
    name = shown_name(trainer.name)
    return f"{name} ({shown_name(trainer.where)})" if trainer.where else name


def _incident_line(incident: Incident) -> str:
    """Return the line of an incident: what happened, and which snapshot there is of it."""
    text = f"incident   {times.clock_of(incident.time)} {shown_name(incident.trainer.name)} {incident.kind}"
    if incident.reason:
        text += f": {shown_text(incident.reason)}"
    if incident.snapshot:
        return f"{text}; emergency snapshot {incident.snapshot}"
    return (
        f"{text}; no emergency snapshot: {shown_text(incident.no_snapshot)}" if incident.no_snapshot else text
    )

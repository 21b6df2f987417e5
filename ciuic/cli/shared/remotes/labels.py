"""Labels of snapshots on a remote: job, epoch, step and host, as options, columns and fields of ``list``.

They stand in the names of manifests, so that snapshots are chosen by them before a manifest is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from ciuic.errors import UsageError

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session
    from ciuic.cli.shared.tables import Column
    from ciuic.repository import SnapshotInfo

FILES: Final = "files"
"""Job of snapshots of files (docs/remote-format.md, section 2)."""


class WantedLabels(NamedTuple):
    """Labels by which ``list`` chooses; None: any."""

    job: str | None = None
    epoch: int | None = None
    step: int | None = None
    host: str | None = None

    @property
    def are_set(self) -> bool:
        """True if one of them is given."""
        return any(label is not None for label in self)


def label_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --job, --epoch, --step and --host."""
    number = click.IntRange(min=0)
    for add in (
        click.option("--host", metavar="NAME", help="Of a remote: only snapshots of this host."),
        click.option("--step", type=number, metavar="N", help="Of a remote: only states of this step."),
        click.option("--epoch", type=number, metavar="N", help="Of a remote: only states of this epoch."),
        click.option(
            "--job", metavar="NAME", help="Of a remote: only states of the training with this name; or files."
        ),
    ):
        command = add(command)
    return command


def choose(session: Session, wanted: WantedLabels) -> None:
    """Have the session read the snapshots with these labels alone.

    Raises:
        UsageError: no remote is read.
        NotFound: no snapshot is of this host.
    """
    if not wanted.are_set:
        return
    if session.remote_url is None:
        raise UsageError(
            "--job, --epoch, --step and --host choose among the snapshots of a remote",
            hint="with --repo URL or --all-hosts; in a repository of this host --root /NAME chooses a training",
        )
    session.narrow_remote(lambda remote: remote.labelled(*wanted))


def document(session: Session, info: SnapshotInfo) -> dict[str, Any]:
    """Return the fields of a snapshot in JSON; None where a snapshot has no such label."""
    name = None if session.remote_url is None else session.remote.snapshots.label(info.id)
    if name is None or name.job == FILES:
        return {"job": None, "epoch": None, "step": None}
    return {"job": name.job, "epoch": name.epoch, "step": name.step}


def columns(session: Session, infos: Sequence[SnapshotInfo]) -> tuple[list[Column], dict[str, list[str]]]:
    """Return the columns of labels, and the cells of each snapshot by its id; none where no snapshot is a state's."""
    from ciuic.cli.shared.names import shown_text
    from ciuic.cli.shared.tables import Column

    if session.remote_url is None:
        return [], {}
    labels = {info.id: session.remote.snapshots.label(info.id) for info in infos}
    headers = [Column("HOST", shrink=True)]
    hosts = {info.id: [shown_text(info.host)] for info in infos}
    if all(name is None or name.job == FILES for name in labels.values()):
        return headers, {str(id_): cells for id_, cells in hosts.items()}
    cells = {
        str(id_): ["", "", *hosts[id_]]
        if name is None or name.job == FILES
        else [name.job, f"{name.epoch}-{name.step}", *hosts[id_]]
        for id_, name in labels.items()
    }
    return [Column("JOB", shrink=True), Column("EPOCH-STEP", right=True), *headers], cells

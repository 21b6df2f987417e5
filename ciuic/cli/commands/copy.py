"""``ciuic copy``: a copy of a repository in use that can be restored from, made again in the time of what is new.

Guarantees: those of ciuic.maintenance.copying; exit 4 if ``--verify`` finds damage in the copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from ciuic.cli.shared.messages import plural, shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, out_json, out_prose
from ciuic.cli.shared.session import current
from ciuic.errors import Damaged

_WAIT_SECONDS: Final = 600.0
"""Longest wait for a capture or prune; longer than a usual one, as copies run unattended."""


@click.command("copy", cls=FrameCommand)
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every byte of the copy and compare it with its checksum.")
@json_option
def command(target: Path, verify: bool, as_json: bool) -> int:
    """Copy the repository, while it is in use, into DIR: empty, or its last copy.

    Only what is new is copied; snapshots that are gone are removed from the copy, last. Snapshots are taken meanwhile, and
    pruning waits. The copy is a repository: ciuic --repo DIR list.
    """
    from ciuic.cli.commands.verify import as_document, print_damages, reporting
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.copying import copy_repository
    from ciuic.maintenance.verify import verify_snapshots
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own
    from ciuic.units import human_size

    session = current()
    if session.remote_url is not None:
        raise click.UsageError("copy copies a repository of this machine, and --repo names a remote")
    # Also before there is a repository: the owner of a directory above could exchange it during the copy.
    require_own(target.absolute(), trusted=session.trusts_repository)
    with progress("copy") as reporter:
        result = copy_repository(
            session.own_repository, target.absolute(), wait_seconds=_WAIT_SECONDS, progress=reporter.step
        )
    found = None
    if verify:
        with Repository.open(target) as copy, reporting() as report:
            found = verify_snapshots(copy, None, checksum=True, progress=report)
    if as_json:
        out_json({**result._asdict(), "verify": None if found is None else as_document(found)})
    else:
        gone = f", {plural(result.removed, 'snapshot')} removed" if result.removed else ""
        out_prose(
            f"{shown_text(str(target))}: {plural(result.snapshots, 'snapshot')}{gone}; "
            f"{plural(result.copied_packs, 'pack')} copied ({human_size(result.copied_bytes)}), "
            f"{plural(result.kept_packs, 'pack')} there already",
            2,
        )
        if found is not None:
            print_damages(found)
            out_prose("verified: every byte is right" if not found.damaged else "the copy is damaged", 2)
    return Damaged.exit_code if found is not None and found.damaged else 0

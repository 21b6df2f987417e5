"""``ciuic pick``: a screen that goes from a path to its versions, looks into them and brings one back.

Guarantees: nothing is changed but by a restore that was confirmed, and by a copy that was asked for. The program can be left at once,
also while a remote does not answer. `reader` is the thread that reads, `answers` what is read, `restoring` the restores, `screen` the rest:
it alone needs textual, from the extra ``tui``.
"""

from __future__ import annotations

import os
import sys

import click

from ciuic.cli import INTERRUPTED
from ciuic.cli.shared.messages import complain
from ciuic.cli.shared.options import SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import out
from ciuic.cli.shared.session import Session
from ciuic.errors import UsageError, pip_install


@click.command("pick", cls=FrameCommand)
@click.argument("path", required=False, type=SNAPSHOT_PATH)
@click.pass_context
def command(context: click.Context, path: bytes | None) -> int:
    """Choose a path on the screen, then one of its versions; look into it and restore it.

    Names that are gone are shown as well. Needs the Python package textual: pip install 'ciuic[tui]'. Nothing is changed until a restore is
    confirmed.
    """
    try:
        from ciuic.cli.commands.pick.screen import Picker
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ciuic":
            raise
        raise UsageError(
            f"ciuic pick needs the Python package {error.name}, which is not installed",
            hint=pip_install("ciuic[tui]"),
        ) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "ciuic pick needs a terminal", hint="ciuic find, history, cat and restore do the same in scripts"
        )
    from ciuic.cli.commands.pick.reader import Reader

    # The screen has the terminal: a key of a remote comes from the configuration or the environment.
    context.ensure_object(Session).may_ask = False
    reader = Reader(context)
    picker = Picker(reader, path, os.getcwdb())
    reader.start()
    is_interrupted = False
    try:
        picker.run()
    # SIGTERM and SIGHUP as well.
    except KeyboardInterrupt:
        is_interrupted = True
    has_ended = reader.end()
    if picker.exit_status == INTERRUPTED:
        complain("the restore was left as it is; ciuic status says how it goes on")
    if not has_ended:
        # A store or a disk does not answer, or a restore is left: the interpreter would wait for its threads.
        _print(picker.printed)
        sys.stdout.flush()
        os._exit(INTERRUPTED if is_interrupted else picker.exit_status)
    if is_interrupted:
        raise KeyboardInterrupt
    if picker.failure is not None:
        raise picker.failure
    _print(picker.printed)
    return picker.exit_status or picker.return_code or 0


def _print(lines: list[str]) -> None:
    for line in lines:
        out(line)

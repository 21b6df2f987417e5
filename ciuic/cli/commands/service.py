"""``ciuic service``: the systemd units, installed, removed, looked at.

Guarantees: the unit runs this installation of ciuic and no other; installing twice is installing once; where systemd does
not run, the command says so and changes nothing, and so it does where the service could not read its configuration.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import click

from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import FrameCommand, FrameGroup
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import current


@click.group("service", cls=FrameGroup)
def command() -> None:
    """Install, remove or look at the systemd service."""


@command.command("install", cls=FrameCommand)
@click.option("--no-start", is_flag=True, help="Write and enable the units, start nothing.")
@json_option
def install(no_start: bool, as_json: bool) -> None:
    """Check the configuration, and install the systemd units, enabled and started."""
    from ciuic.cli.shared.systemd import Systemd, this_program
    from ciuic.config import check_owners, load_config, raise_for

    named = current().config_option
    system = Systemd()
    system.require()
    # Before anything is written: a service with a configuration that is not valid would be started over and over
    # to fail. Without this process's variables, which the service does not get.
    config = load_config(named, environ={})
    raise_for(check_owners(config))
    program = this_program()
    _say_if_foreign(program)
    if config.remotes:
        _say_if_closed(program)
    # Only a file that was named: the service searches the usual places by itself, also for one that appears
    # later.
    written = system.install(program, config=config.file if named else None, start=not no_start)
    if as_json:
        out_json({"units": [str(path) for path in written], "enabled": True, "started": not no_start})
        return
    for path in written:
        note(f"wrote {path}")
    out("ciuic.service is enabled" + ("" if no_start else " and running"))
    if not config.roots:
        note("no root is protected yet: ciuic protect PATH")


def _say_if_foreign(program: Path) -> None:
    """Warn of a service of root's that runs a program that others may change."""
    # No refusal, because a developer's own checkout is like that.
    from ciuic.system.ownership import find_flaw

    flaw = find_flaw(program) if os.geteuid() == 0 else None
    if flaw is not None:
        warn(f"whoever can will choose what root runs: the {shown_text(flaw.found)}", hint=flaw.remedy)


def _say_if_closed(program: Path) -> None:
    """Warn of a program that the user of ciuic-upload.service cannot reach."""
    from ciuic.cli.shared.systemd import this_interpreter

    # The interpreter as well: a virtual environment often leads to one in the home of its owner.
    for path in (Path(os.path.realpath(program)), this_interpreter()):
        closed = next((one for one in (path, *path.parents) if not os.stat(one).st_mode & stat.S_IXOTH), None)
        if closed is not None:
            warn(
                f"ciuic-upload.service cannot run {shown_text(str(program))}: other users cannot enter {shown_text(str(closed))}",
                hint="install ciuic where every user may run it, such as /usr/local or /opt",
            )
            return


@command.command("uninstall", cls=FrameCommand)
@json_option
def uninstall(as_json: bool) -> None:
    """Stop and remove the systemd units. Configuration, files and snapshots stay."""
    from ciuic.cli.shared.systemd import Systemd

    system = Systemd()
    system.require()
    removed = system.uninstall()
    if as_json:
        out_json({"removed": [str(path) for path in removed]})
    else:
        out("ciuic.service is removed" if removed else "ciuic.service was not installed")


@command.command("status", cls=FrameCommand)
@json_option
def status(as_json: bool) -> None:
    """Say whether the units are installed, enabled and running."""
    from ciuic.cli.shared.systemd import Systemd

    system = Systemd()
    system.require()
    facts = system.facts()
    if as_json:
        out_json(facts)
    elif not facts["installed"]:
        out("ciuic.service is not installed; ciuic service install")
    else:
        for unit, shown in (("ciuic.service", facts), ("ciuic-upload.service", facts["upload"])):
            if not shown["installed"]:
                # Installed by an older version; nothing is missing where no remote is configured.
                note(f"{unit} is not installed; ciuic service install")
                continue
            out(f"{unit}: {shown['active']}, {shown['enabled']}, pid {shown['pid'] or 'none'}")
            if shown["text"]:
                out(f"  {shown['text']}")

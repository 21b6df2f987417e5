"""``ciuic service``, ``stop`` and ``reload``: the systemd units, and the running daemon's end and new configuration.

Guarantees of ``service``: the unit runs this installation of ciuic and no other; installing twice is installing once; where systemd
does not run, the command says so and changes nothing, and so it does where the service could not read its configuration.

``stop`` and ``reload`` work with and without systemd: the daemon is asked over its control socket.

Guarantees of ``stop``: on return the daemon has let go of its roots and of its runtime directory, so that another one can start; a
root that is still mounted is named with who is in it, or, where nobody is, as a failure (exit 8). The daemon ends as with SIGTERM,
with status 0, and systemd (Restart=on-failure) leaves it stopped until it, or the machine, is started.

Guarantees of ``reload``: on return every added root is mounted or named as failed (exit 8), every removed one unmounted; a
configuration that is not valid changes nothing and ends with the daemon's own message (exit 2).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ciuic.cli.shared.messages import complain, shown_text, warn
from ciuic.cli.shared.options import FrameCommand, FrameGroup
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.overlay_fate import in_use, overlay_fate, remedy
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotPermitted, Partial, Unreachable
from ciuic.system.poll import wait_until

if TYPE_CHECKING:
    from ciuic.protocol.control_types import ReloadReport, StatusDocument


@click.group("service", cls=FrameGroup)
def service_command() -> None:
    """Install, remove or look at the systemd service."""


@service_command.command("install", cls=FrameCommand)
@click.option("--no-start", is_flag=True, help="Write and enable the units, start nothing.")
@json_option
def install(no_start: bool, as_json: bool) -> None:
    """Check the configuration, and install the systemd units, enabled and started."""
    from ciuic.cli.shared.systemd import Systemd, directories_of, this_program
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
    written = system.install(
        program,
        config=config.file if named else None,
        start=not no_start,
        places=directories_of(config.remotes),
    )
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


@service_command.command("uninstall", cls=FrameCommand)
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


@service_command.command("status", cls=FrameCommand)
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


_POLL_SECONDS: Final = 0.1
# Between the last answer and the release of the daemon's lock, which gives open connections 3 s to end
# (GRACEFUL_SECONDS of its server). A lock file that a killed daemon left is there for ever, so that the wait
# needs an end.
_LOCK_SECONDS: Final = 10.0


@click.command("stop", cls=FrameCommand)
@json_option
def stop_command(as_json: bool) -> None:
    """Stop the running daemon, as SIGTERM does, and wait until it has ended.

    Its roots are unmounted: the plain files are there, in the same place, and no snapshots are taken until it runs again.
    A root that a process works in is served until the last one has left; the processes are named.
    """
    session = current()
    # Its roots are named afterwards, when there is nobody left to ask.
    try:
        before = session.control.status()
    except Unreachable as error:
        left = _mounted_roots(session)
        if not left:
            raise
        # Workers outlive their daemon by design.
        raise Unreachable(
            f"{error.message}, and still mounted: {shown_text(', '.join(left))}",
            hint=remedy(left, "which takes the mounts over, and stop it"),
        ) from None
    session.control.stop()
    try:
        _await_end(session, before)
    except KeyboardInterrupt:
        complain(f"the daemon (pid {before.pid}) goes on stopping")
        raise
    fates = {root.path: in_use(root.path) for root in before.roots}
    left = [path for path, users in fates.items() if users == ""]
    if as_json:
        roots = [
            {
                "path": root.path,
                "mounted": fates[root.path] is not None,
                "in_use_by": fates[root.path] or "",
                "open_files": root.open_files,
            }
            for root in before.roots
        ]
        out_json({"stopped": True, "pid": before.pid, "roots": roots})
    else:
        _print_stopped(before, fates)
    if left:
        raise Partial(
            f"the daemon has ended, but still mounted: {shown_text(', '.join(left))}",
            hint=remedy(left, "which takes the mount over, and stop it again"),
        )


def _mounted_roots(session: Session) -> list[str]:
    """Return the configured roots that are mounted; none where the configuration cannot be read."""
    from ciuic.config import is_ciuic_mount
    from ciuic.system import mountinfo

    try:
        roots = session.config.roots
    except CiuicError:
        return []
    mounts = mountinfo.read()
    return [str(root.path) for root in roots if is_ciuic_mount(root.path, mounts)]


def _await_end(session: Session, before: StatusDocument) -> None:
    """Return when the daemon of ``before`` answers no more and has released its lock.

    Without a time limit: it writes back what the kernel caches, and a disk may be slow. ^C ends the wait alone.
    """
    try:
        while True:
            now = session.control.status()
            if (now.pid, now.since) != (before.pid, before.since):
                # Another one has been started meanwhile, so the lock was free. The pid alone would not tell:
                # it may have been given out again.
                return
            time.sleep(_POLL_SECONDS)
    except (Unreachable, NotPermitted):
        pass
    lock = _lock_file(session)
    wait_until(lambda: not lock.exists(), _LOCK_SECONDS, _POLL_SECONDS)


def _lock_file(session: Session) -> Path:
    from ciuic.config import load

    # The daemon runs on with the configuration that it read, so that a mistake made in the file since is no
    # reason to fail.
    return load.readable_part(session.config_option).runtime_dir / "daemon.lock"


def _print_stopped(before: StatusDocument, fates: Mapping[str, str | None]) -> None:
    from ciuic.system import service_manager

    out(f"the daemon (pid {before.pid}) has ended")
    for root in before.roots:
        users = fates[root.path]
        if users is None:
            out(f"{shown_text(root.path)}: unmounted; the plain files are in its place")
        elif users:
            out(f"{shown_text(root.path)}: served until nobody is in it, then unmounted: {shown_text(users)}")
    if before.roots:
        note(f"no snapshots are taken until it runs again; {service_manager.start_hint()}")


@click.command("reload", cls=FrameCommand)
@json_option
def reload_command(as_json: bool) -> None:
    """Have the running daemon read its configuration again; wait for it, and report what changed.

    A configuration that is not valid changes nothing (exit 2).
    """
    from ciuic.system import service_manager

    report = current().control.reload()
    failed = [change for change in report.changes if change.change == "added" and change.state != "mounted"]
    if as_json:
        import msgspec

        out_json(msgspec.to_builtins(report))
    else:
        _print_reloaded(report)
    if report.at_restart:
        warn(
            f"{', '.join(report.at_restart)}: in force from the next start of the daemon on",
            hint=service_manager.restart_hint(),
        )
    if failed:
        reasons = "; ".join(f"{shown_text(change.path)}: {shown_text(change.error)}" for change in failed)
        raise Partial(
            f"the configuration is in force, but not everything is mounted: {reasons}",
            hint="the daemon keeps trying; ciuic status shows how it goes",
        )


def _print_reloaded(report: ReloadReport) -> None:
    out(f"{shown_text(report.config_path) or 'the configuration'} is in force")
    for change in report.changes:
        if change.change == "removed":
            out(f"{shown_text(change.path)} is no longer protected; {overlay_fate(change.path)}")
        elif change.state == "mounted":
            out(f"{shown_text(change.path)} is protected, mounted")

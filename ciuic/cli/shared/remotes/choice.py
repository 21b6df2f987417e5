"""Options with which a command reads a remote in place of the repository."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ciuic.cli.shared.session import Session
from ciuic.errors import NotFound, UsageError


def use_configured_remote(session: Session, name: str = "") -> None:
    """Have the session read the configured remote of this name, or the only one.

    Raises:
        UsageError: none is configured, or several are and none was named.
        NotFound: none has this name.
    """
    remotes = session.config.remotes
    named = [remote for remote in remotes if name in ("", remote.name)]
    if name and not named:
        known = ", ".join(remote.name for remote in remotes) or "none"
        raise NotFound(f"no remote {name!r} is configured", hint=f"there is: {known}")
    if len(named) != 1:
        known = ", ".join(f"{remote.name} ({remote.url})" for remote in remotes) or "none"
        raise UsageError(f"which remote? configured: {known}", hint="name it: --name NAME, or --repo URL")
    session.repo_option, session.remote_option = None, named[0].url


def remote_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --remote and --name; see `use_remote`."""
    for add in (
        click.option("--name", default="", metavar="NAME", help="With --remote: its name, of several."),
        click.option(
            "--remote", "remote", is_flag=True, help="The configured remote instead; or --repo URL."
        ),
    ):
        command = add(command)
    return command


def use_remote(session: Session, remote: bool, name: str) -> bool:
    """Have the session read the remote that --remote, --name or --repo mean, and return whether they mean one.

    Raises:
        UsageError, NotFound: as `use_configured_remote`; or --name was given alone.
    """
    if name and not remote:
        raise UsageError("--name goes with --remote")
    if remote and session.remote_url is None:
        use_configured_remote(session, name)
    elif name:
        raise UsageError("--name names a configured remote, and --repo another: give one or the other")
    return session.remote_url is not None

"""``ciuic web``: a page over the snapshots, for a browser; and ``ciuic log``: what was done from it.

Two processes. `front_process` faces browsers: `access` says who is let in, `rights` what they may, `front` what each address shows, `reading` what is read for it,
`live` keeps open pages fresh. `broker` is the one with privileges: status and events of the daemon, and actions; `serving` starts both.
Templates need jinja2, from the extra ``web``.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ciuic.cli.shared.messages import shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import Column, json_option, note, out, out_json, show_table
from ciuic.cli.shared.session import Session, current
from ciuic.config import Config
from ciuic.config.values import listen_value
from ciuic.errors import CiuicError, Unreachable, UsageError, pip_install

if TYPE_CHECKING:
    from ciuic.cli.commands.web.broker import ActionLog
    from ciuic.cli.commands.web.rights import Admission


@click.command("web", cls=FrameCommand)
@click.option(
    "--listen", metavar="HOST:PORT", help="Address beside the Unix socket, instead of `web.listen`."
)
@click.option("--login", is_flag=True, help="Print a link that logs a browser in, once; serve nothing.")
@click.option(
    "--actions/--read-only",
    "actions",
    default=None,
    help="Whether the page may restore, take, hold and forget snapshots, instead of `web.actions`.",
)
def web_command(listen: str | None, login: bool, actions: bool | None) -> None:
    """Show the snapshots in a browser, in the foreground, until SIGTERM.

    Without --listen the page is on a Unix socket alone: ssh -L 8470:/run/ciuic-web/web.sock HOST brings it to the browser of another
    machine.
    """
    session = current()
    config = session.config
    directory = web_directory(session)
    if login:
        _print_link(directory)
        return
    try:
        import jinja2  # noqa: F401 (asked for before anything is served)
    except ModuleNotFoundError as error:
        raise UsageError(
            "ciuic web needs the Python package jinja2, which is not installed",
            hint=pip_install("ciuic[web]"),
        ) from error
    try:
        place = config.web.listen if listen is None else listen_value(listen)
    except ValueError as error:
        raise UsageError(f"--listen {error}") from error
    _serve(session, config, directory, place, config.web.actions if actions is None else actions)


def web_directory(session: Session) -> Path:
    """Return the runtime directory of the page, beside the daemon's: that is gone while the daemon does not run.

    The page of a remote has one of its own, so that it runs beside that of the repository.
    """
    daemon = session.config.runtime_dir
    return daemon.with_name(f"{daemon.name}-web{'-remote' * (session.remote_url is not None)}")


def _serve(session: Session, config: Config, directory: Path, listen: str | None, may_act: bool) -> None:
    import trio

    from ciuic.cli.commands.web.jobs import FrontJob
    from ciuic.cli.commands.web.serving import WEB_SOCKET, Page
    from ciuic.system import logs
    from ciuic.system.child_process import module_command
    from ciuic.system.privileges import unprivileged_user
    from ciuic.verdicts.records import read_key

    is_remote = session.remote_url is not None
    options: list[str] = []
    if session.config_option is not None:
        options += ["--config", str(session.config_option.absolute())]
    if session.repo_option is not None:
        options += ["--repo", str(session.repo_option)]
    if session.trust_option:
        options.append("--trust-repository")
    job = FrontJob(
        sockets=(),
        broker="",
        repository="" if is_remote else str(session.repository_dir),
        remote=session.remote_url or "",
        as_host=session.as_host,
        config=str(session.config_option.absolute()) if session.config_option is not None else "",
        trust_repository=session.trusts_repository,
        verdict_key=read_key().hex(),
        checkpoint_patterns=config.checkpoint_patterns,
        host=socket.gethostname(),
        links=f"http://{listen}" if listen is not None else "",
        may_act=may_act and not is_remote,
        hosts=tuple(config.web.hosts),
        admission=_admission(config),
        proxy_uid=None if config.web.proxy_user is None else _user_id(config.web.proxy_user),
        user_header=config.web.user_header,
        run_as=unprivileged_user(),
    )
    secrets = {
        name: value for name, value in os.environ.items() if is_remote and name.startswith("CIUIC_REMOTE_")
    }

    async def serve() -> None:
        page = Page(
            directory,
            listen,
            job,
            control=config.control.socket,
            command=[*module_command("ciuic"), *options],
            log=action_log(),
            secrets=secrets,
        )
        note(f"the page is at {directory / WEB_SOCKET}" + (f" and http://{listen}/" if listen else ""))
        members = ", ".join(f"{one.name} ({one.right.name.lower()})" for one in job.admission.groups)
        note(f"root and this user are let in{f', and members of {members}' if members else ' alone'}")
        note(
            "ciuic web --login prints a link for a browser"
            if listen
            else "ciuic web --help says how to look at it"
        )
        sys.stderr.flush()
        await page.run()

    logs.configure(verbose=session.verbosity > 0)
    trio.run(serve)


def _admission(config: Config) -> Admission:
    import grp

    from ciuic.cli.commands.web.rights import Admission, Right, RightGroup

    web, groups = config.web, []
    for right, name in (
        (Right.LOOK, web.look_group),
        (Right.RESTORE, web.restore_group),
        (Right.DECIDE, web.decide_group),
    ):
        try:
            groups += [] if name is None else [RightGroup(right, name, grp.getgrnam(name).gr_gid)]
        except KeyError:
            raise UsageError(f"there is no group {name}, which `{right.key}` names") from None
    return Admission(uids=tuple({0, os.geteuid()}), groups=tuple(groups))


def _user_id(name: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UsageError(f"there is no user {name}, which `web.proxy_user` names") from None


def _print_link(directory: Path) -> None:
    from ciuic.cli.commands.web.serving import WEB_SOCKET
    from ciuic.protocol.socket_http import Connection
    from ciuic.structs import decode_json

    path = directory / WEB_SOCKET
    with Connection(str(path), connect_seconds=5) as connection:
        answer = connection.ask("POST", "/login-link", b"", answer_seconds=10)
    if answer.status != 200:
        raise CiuicError(
            "no link was given",
            hint="run this as root, as who runs ciuic web, or as a member of a group of [web]",
        )
    found = decode_json(answer.body, dict[str, str])
    if not found["page"]:
        raise Unreachable(
            "the page is on its Unix socket alone, to which no link leads",
            hint=f"ssh -L 8470:{path} HOST, and http://localhost:8470/; or --listen 127.0.0.1:8470",
        )
    out(found["page"] + found["path"])


def action_log() -> ActionLog:
    """Return the log of what was done from the page of this user."""
    from ciuic.cli.commands.web.broker import ActionLog
    from ciuic.system.state_home import state_home

    return ActionLog(state_home("web"))


@click.command("log", cls=FrameCommand)
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only the N newest.")
@json_option
def log_command(limit: int | None, as_json: bool) -> None:
    """Print what was done from the page of `ciuic web`: who, when, what, and how it ended; newest first."""
    import msgspec

    from ciuic.cli.shared import times

    lines = action_log().lines()[::-1][:limit]
    if as_json:
        out_json({"actions": msgspec.to_builtins(lines)})
        return
    if not lines:
        note("nothing was done from the page")
        return
    columns = [Column("TIME"), Column("WHO"), Column("OUTCOME"), Column("WHAT", shrink=True)]
    show_table(
        columns,
        [
            [times.clock_of(one.time), shown_text(one.who), shown_text(one.outcome), shown_text(one.what)]
            for one in lines
        ],
    )

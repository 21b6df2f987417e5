"""Options and argument types that commands share.

Guarantees: the global options may stand before the command or after it; ``ID`` accepts every form of docs/cli.md and
completes; paths arrive as bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared.messages import absolute
from ciuic.cli.shared.output import out
from ciuic.cli.shared.session import URL_MARK, Session
from ciuic.errors import NotFound, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from click.shell_completion import CompletionItem

    _ParamType = click.ParamType[Any]
else:  # not generic before click 8.2
    _ParamType = click.ParamType


class Text(_ParamType):
    r"""Words of a person, which are stored as UTF-8: bytes that are not are kept as escapes (``caf\xe9``)."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text; arguments hold foreign bytes as surrogates (PEP 383)."""
        return os.fsencode(value).decode("utf-8", "backslashreplace") if isinstance(value, str) else value


class Tag(Text):
    """A tag that a person gives a snapshot."""

    name = "tag"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the tag; BadParameter for one that lists and filters could not carry, and for ciuic's own."""
        # Imported here: a table of options that few commands have a use for.
        from ciuic.cli.shared.snapshot_command import RESERVED_TAGS

        tag = super().convert(value, param, ctx)
        # Blanks and commas separate tags in lists, and the bar fields of `list --machine-readable`.
        if not tag or not tag.isprintable() or any(character in tag for character in " ,|"):
            self.fail(f"not a tag: {tag!r} (no blanks, commas or |)", param, ctx)
        if tag in RESERVED_TAGS:
            self.fail(f"{tag} is a tag that ciuic gives itself: choose another", param, ctx)
        return tag


def _remember(
    field: str, made: Callable[[Any], Any] = lambda value: value
) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Return a callback that keeps in the session what ``made`` returns for an option, if it was given here."""

    def keep(context: click.Context, _: click.Parameter, value: Any) -> None:
        session = context.find_object(Session)
        # The option stands in two places, and its callback runs for both: what was not given here must not
        # take back what was given there.
        if value not in (None, False) and session is not None:
            setattr(session, field, made(value))

    return keep


def _absolute_path(value: str) -> Path:
    # Imported here: 5 ms, which `--version` and the help do not pay.
    from pathlib import Path

    return Path(os.path.abspath(value))


def _remember_place(context: click.Context, _: click.Parameter, value: str | None) -> None:
    """Keep --repo in the session: the URL of a remote, or a directory."""
    session = context.find_object(Session)
    if value is None or session is None:
        return
    is_url = URL_MARK in value
    session.remote_option = value if is_url else None
    session.repo_option = None if is_url else _absolute_path(value)


def _louder(context: click.Context, _: click.Parameter, count: int) -> None:
    session = context.find_object(Session)
    if count and session is not None:
        session.verbosity = count


def _quieter(context: click.Context, _: click.Parameter, quiet: bool) -> None:
    session = context.find_object(Session)
    if quiet and session is not None:
        session.verbosity = -1


def _global_params(*, hidden: bool) -> list[click.Option]:
    """Fresh parameters each time: click keeps them per command. The environment is read by the session.

    Rare ones are hidden everywhere; the first page names them.
    """
    # Not click.Path: it asks gettext for its name, which imports locale (1 ms), as does click's own option for the help.
    place = Place()

    def option(*names: str, hidden: bool = hidden, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, hidden=hidden, **settings)

    return [
        option(
            "--config",
            type=place,
            metavar="FILE",
            callback=_remember("config_option", _absolute_path),
            help="Configuration file (CIUIC_CONFIG).",
        ),
        option(
            "--repo",
            type=place,
            metavar="DIR|URL",
            callback=_remember_place,
            help="Repository, or remote to read from; needs no configuration file (CIUIC_REPO).",
        ),
        option(
            "--as-host",
            hidden=True,
            metavar="NAME",
            callback=_remember("as_host"),
            help="Of a remote, only the snapshots of this host.",
        ),
        option(
            "--behind-deletions",
            is_flag=True,
            hidden=True,
            callback=_remember("behind_deletions"),
            help="Of a remote in a bucket with versions, also what was deleted or overwritten.",
        ),
        option(
            "--all-claims",
            is_flag=True,
            hidden=True,
            callback=_remember("all_claims"),
            help="Of a remote, also the snapshots that were given up, as far as no collection has deleted them.",
        ),
        option(
            "--stored-before",
            hidden=True,
            metavar="TIME",
            callback=_remember("stored_before"),
            help="The same, without what was stored at this time or later.",
        ),
        option(
            "--trust-repository",
            is_flag=True,
            hidden=True,
            callback=_remember("trust_option"),
            help="Write into the repository although another user owns it.",
        ),
        option(
            "-v",
            "--verbose",
            count=True,
            callback=_louder,
            help="Say more; twice: with tracebacks.",
        ),
        option(
            "-q",
            "--quiet",
            is_flag=True,
            callback=_quieter,
            help="Say only what is asked for, and what went wrong.",
        ),
    ]


def global_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--config, --repo, --trust-repository, -v, -q for the group."""
    params: list[click.Parameter] = getattr(function, "__click_params__", [])
    # click reverses the list, because decorators are applied from the last to the first.
    function.__click_params__ = [*params, *reversed(_global_params(hidden=False))]  # type: ignore[attr-defined]
    return function


class Place(_ParamType):
    """A file or directory of this machine, which the shell completes, or the URL of a remote; as text."""

    name = "PLACE"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates for the word that is being typed."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class PrintsHelp(click.Command):
    """A command or group whose help is printed like a result.

    Of an error in writing it, click would make exit code 1 for a reader that has left, and a traceback for a full disk.
    """

    _help: click.Option | None = None

    def get_short_help_str(self, limit: int = 1000) -> str:
        """Return the whole summary, which click would cut."""
        return super().get_short_help_str(limit)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option of click with a callback of our own; made once, since click compares options."""
        names = self.get_help_option_names(ctx)
        if not names or not self.add_help_option:
            return None
        if self._help is None:
            self._help = click.Option(
                list(names),
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_help,
                help="Show this message and exit.",
            )
        return self._help


def _print_help(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        out(context.get_help())
        context.exit()


def version_option(version: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """-V, --version, printed like a result."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            out(f"{context.find_root().info_name} {version}")
            context.exit()

    return click.option(
        "-V",
        "--version",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show the version and exit.",
    )


class FrameGroup(PrintsHelp, click.Group):
    """A group of commands within the program."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their whole summaries, which click would cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str()) for name, command in commands if command is not None]
            )


class FrameCommand(PrintsHelp):
    """A command that takes the global options after its name, too: people type them where they think of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(_global_params(hidden=True))


class SnapshotText(_ParamType):
    """A snapshot id in any of its forms, as text; the repository resolves it. Completes from the repository."""

    name = "ID"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates for the word that is being typed."""
        from ciuic.cli.shared.completion import complete_snapshot

        return complete_snapshot(ctx, incomplete)


class SnapshotPath(_ParamType):
    """A path as it was at a snapshot: absolute bytes, not looked up here. Completes from the snapshot."""

    name = "PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Return the path as bytes."""
        return _as_path(self, value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates for the word that is being typed."""
        from ciuic.cli.shared.completion import complete_snapshot_path

        return complete_snapshot_path(ctx, incomplete)


class HostPath(_ParamType):
    """A path on this machine: absolute bytes, not looked up here. The shell completes it."""

    name = "PATH"

    def __init__(self, *, directory: bool = False) -> None:
        self._kind = "dir" if directory else "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Return the path as bytes."""
        return _as_path(self, value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates for the word that is being typed."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self._kind)]


def _as_path(kind: _ParamType, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
    path = os.fsencode(value)
    if not path:
        kind.fail("an empty path", param, ctx)
    return absolute(path)


ID = SnapshotText()
SNAPSHOT_PATH = SnapshotPath()
DIRECTORY = HostPath(directory=True)
HOST_PATH = HostPath()


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

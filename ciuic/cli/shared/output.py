"""Output of commands: results to stdout, everything else to stderr.

Guarantees: stdout carries results only, and with ``--json`` exactly one document; a reader that leaves early is noticed
quietly and does not change the exit code; colour only on a terminal and never with NO_COLOR.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from ciuic.cli.shared.messages import complain, redirect_to_null, styled
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError

# On anything narrower an indented word a line is all that would be left.
MIN_WIDTH: Final = 20


def out(text: str = "", *, newline: bool = True, **style: Any) -> None:
    """Print a line of the result."""
    session = current()
    if session.stdout_gone:
        return
    try:
        click.echo(styled(text, **style), nl=newline)
    # `| head` has read what it wanted. A full disk is different: the caller relies on a result that is not
    # there.
    except BrokenPipeError:
        abandon_stdout(session)
    except OSError as error:
        abandon_stdout(session)
        raise CiuicError(f"the output could not be written: {error.strerror}") from error


def out_prose(text: str, indent: int, **style: Any) -> None:
    """Print a line of words; on a terminal it is broken between them, and further lines begin at column ``indent``."""
    out("\n".join(wrapped(text, indent)), **style)


def wrapped(text: str, indent: int) -> list[str]:
    """Return the lines of a text, no wider than the terminal unless a single word is; one line without a terminal.

    A terminal breaks a long line inside words and numbers, which cannot be read back or copied.
    """
    width = terminal_width()
    if width is None or len(text) <= width:
        return [text]
    import textwrap

    return textwrap.wrap(
        text,
        max(width, MIN_WIDTH),
        subsequent_indent=" " * indent,
        break_long_words=False,
        # Ids and options have hyphens and are copied whole.
        break_on_hyphens=False,
    )


def terminal_width() -> int | None:
    """Return the width of stdout's terminal in columns; None without a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def out_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Print the one document of a ``--json`` run."""
    session = current()
    # Before it is written: after half of a document a second one would be no JSON either.
    session.printed_json = True
    # ASCII only: the same bytes whatever the locale says.
    out(json.dumps(document, indent=2, ensure_ascii=True))


def note(text: str) -> None:
    """Print a message that is not the result, unless -q is given."""
    if current().verbosity >= 0:
        complain(text)


def detail(text: str) -> None:
    """Print a message for -v."""
    if current().verbosity > 0:
        complain(text)


def abandon_stdout(session: Session) -> None:
    """Redirect stdout to /dev/null, so that flushing it when the interpreter ends does not fail again."""
    session.stdout_gone = True
    redirect_to_null(sys.stdout)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``--json``, passed to the command as ``as_json``."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> bool:
        session = context.find_object(Session)
        # In the session for `guarded`, which reports failures of a command that has not begun as JSON, too.
        if session is not None:
            session.json = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, callback=remember, help="Print one JSON document."
    )(command)

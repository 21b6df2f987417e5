"""Where results and messages go: results to stdout, everything else to stderr.

Guarantees: stdout carries results only, and with ``--json`` exactly one document; a reader that leaves early is noticed
quietly and does not change the exit code; colour only on a terminal and never with NO_COLOR.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from ciuic.cli.session import Session, current
from ciuic.errors import CiuicError

MIN_WIDTH: Final = 20
"""On anything narrower an indented word a line is all that would be left."""


def out(text: str = "", *, newline: bool = True, **style: Any) -> None:
    """Prints a result."""
    session = current()
    if session.stdout_gone:
        return
    try:
        click.echo(styled(text, **style), nl=newline)
    except BrokenPipeError:
        abandon_stdout(session)
    except OSError as error:
        abandon_stdout(session)
        raise CiuicError(f"the output could not be written: {error.strerror}") from error


def out_prose(text: str, indent: int, **style: Any) -> None:
    """Print a line of words; on a terminal it is broken between them, and further lines begin at column ``indent``."""
    out("\n".join(wrapped(text, indent)), **style)


def wrapped(text: str, indent: int) -> list[str]:
    """The lines of a text: on a terminal no longer than it is wide, unless a single word is; else one.

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
        break_on_hyphens=False,
    )


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def styled(text: str, **style: Any) -> str:
    """The text in colour, where colour is wanted; click takes it off again where stdout is no terminal."""
    given = {key: value for key, value in style.items() if value}
    return click.style(text, **given) if given and not os.environ.get("NO_COLOR") else text


def out_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Prints the one document of a ``--json`` run."""
    session = current()
    session.printed_json = True
    # ASCII only: the same bytes whatever the locale says.
    out(json.dumps(document, indent=2, ensure_ascii=True))


def note(text: str) -> None:
    """Says something that is not the result; -q silences it."""
    if current().verbosity >= 0:
        complain(text)


def detail(text: str) -> None:
    """Says something only for -v."""
    if current().verbosity > 0:
        complain(text)


def warn(text: str, *, hint: str = "") -> None:
    """Says something that the operator must not miss; -q does not silence it."""
    complain(styled("warning: ", fg="yellow") + text)
    if hint:
        complain(f"  {hint}")


def complain(text: str) -> None:
    """To stderr, above a progress line if one is shown."""
    complain_raw(text)


def complain_raw(text: str) -> None:
    """To stderr; that nobody is left to read it is no reason to fail."""
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        _to_null(sys.stderr)


def abandon_stdout(session: Session) -> None:
    """From here on stdout leads nowhere, so that nothing fails again when the interpreter flushes it."""
    session.stdout_gone = True
    _to_null(sys.stdout)


def _to_null(stream: Any) -> None:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a test's buffer has no descriptor, and needs none
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``, passed to the command as ``as_json``."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> bool:
        session = context.find_object(Session)
        if session is not None:
            session.json = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, callback=remember, help="Print one JSON document."
    )(command)

"""Output of commands: results and tables to stdout, everything else to stderr.

Guarantees: stdout carries results only, and with ``--json`` exactly one document; a reader that leaves early is noticed
quietly and does not change the exit code; colour only on a terminal and never with NO_COLOR.

Tables are drawn with rich on a terminal, and are plain aligned columns everywhere else. On a terminal that is too narrow for the table each row becomes a record: its first cell on a line of its own, the others
below it with their headers, broken between cells and never inside a number.

rich is imported only where it draws: it doubles the time that ``ciuic list`` takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from ciuic.cli.shared.messages import MIN_WIDTH, complain, redirect_to_null, styled, taken, wrapped_to
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError


def out(text: str = "", *, newline: bool = True, **style: Any) -> None:
    """Print a line of the result."""
    session = current()
    if session.stdout_gone or taken(text):
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
    return [text] if width is None else wrapped_to(text, indent, width)


def terminal_width() -> int | None:
    """Return the width of stdout's terminal in columns; None without a terminal."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size

    return get_terminal_size().columns


def out_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Print the one document of a ``--json`` run."""
    import json

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


# A path or a sentence that is folded more often cannot be read.
_LEAST_WIDTH: Final = 24
"""Width down to which a column may shrink, in columns of the terminal."""


class Column:
    """``right`` aligns numbers; ``shrink`` marks the column that gives way on a narrow terminal."""

    # Neither a tuple with names nor a struct, here and below: Python compiles the one (0.1 ms), the other needs msgspec (6 ms), and
    # each command imports the module.
    def __init__(self, header: str, right: bool = False, shrink: bool = False) -> None:
        self.header = header
        self.right = right
        self.shrink = shrink


class Cell:
    """Text with a rich style (``red``, ``dim`` …)."""

    def __init__(self, text: str, style: str = "") -> None:
        self.text = text
        self.style = style


Row = Sequence["str | Cell"]


VERDICT_COLOURS: Final = {"GOOD": "green", "TORN": "red", "UNKNOWN": "yellow"}


def show_table(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Print the table. Cells are one line of printable characters (see messages.py)."""
    width = terminal_width()
    # A pipe gets aligned columns of any width, without rich: its import takes 40 ms.
    if width is None:
        _align(columns, rows)
    elif _fits(columns, rows, width):
        # Prose is folded between words, a path wherever the line ends: it keeps its width where the prose can give way.
        whole = [
            Column(column.header, column.right, column.shrink and _is_prose(rows, at))
            for at, column in enumerate(columns)
        ]
        _draw(whole if _fits(whole, rows, width) else columns, rows)
    else:
        _records(columns, rows, max(width, MIN_WIDTH))


def _fits(columns: Sequence[Column], rows: Sequence[Row], width: int) -> bool:
    """Return True if all columns but those that may shrink fit: half an id is useless."""
    needed = 0
    for index, column in enumerate(columns):
        longest = max(len(column.header), *(len(_text(row[index])) for row in rows), 0)
        needed += min(longest, _LEAST_WIDTH) if column.shrink else longest
    return needed + 2 * (len(columns) - 1) <= width


def _is_prose(rows: Sequence[Row], at: int) -> bool:
    return any(" " in _text(row[at]) for row in rows)


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _align(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    lines = [[column.header for column in columns], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    aligned = []
    for line in lines:
        cells = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        aligned.append("  ".join(cells).rstrip())
    out("\n".join(aligned))


def _records(columns: Sequence[Column], rows: Sequence[Row], width: int) -> None:
    for row in rows:
        out(_text(row[0]), bold=True)
        line = ""
        # Pairs of header and text are kept together, so that a number is never separated from what it counts.
        for column, cell in zip(columns[1:], row[1:], strict=True):
            text = _text(cell)
            if not text:
                continue
            pair = f"{column.header.lower()} {text}"
            if line and len(line) + 2 + len(pair) > width:
                out(line)
                line = ""
            line = f"{line}; {pair}" if line else f"  {pair}"
            # Longer than the terminal by itself, such as a path: broken between its words.
            if len(line) > width:
                *whole, line = wrapped(line, 4)
                for part in whole:
                    out(part)
        if line:
            out(line)


def _draw(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Two blanks between columns, as in a pipe: one is the right padding, one the line of the box.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            column.header,
            justify="right" if column.right else "left",
            no_wrap=not column.shrink,
            overflow="fold" if column.shrink else "ellipsis",
        )
    for row in rows:
        # Text, not str: brackets in a file name are not markup.
        table.add_row(
            *(Text(_text(cell), style=cell.style if isinstance(cell, Cell) else "") for cell in row)
        )
    # highlight=False: rich would colour numbers and paths by rules of its own.
    Console(no_color=bool(os.environ.get("NO_COLOR")), highlight=False).print(table)

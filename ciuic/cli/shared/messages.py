"""Messages for the operator on stderr, and names in them as text: paths, which are bytes, for a terminal and for JSON.

Guarantees: colour only on a terminal and never with NO_COLOR; a reader of stderr that has gone is no error. What a terminal or a
log gets of a name is one line of printable characters, whatever the name contains (an escape sequence in a file name must not
drive the operator's terminal), and can be pasted back into bash or zsh; JSON keeps every byte. Names that are plain are shown
plainly. Nothing of the run's session is needed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import click

from ciuic.system.shell_quoting import shown as shown
from ciuic.units import plural as plural  # every command that shows names counts them, too

# On anything narrower an indented word a line is all that would be left.
MIN_WIDTH: Final = 20


def styled(text: str, **style: Any) -> str:
    """Return the text in colour unless NO_COLOR is set; click removes the colour where stdout is no terminal."""
    given = {key: value for key, value in style.items() if value}
    return click.style(text, **given) if given and not os.environ.get("NO_COLOR") else text


def warn(text: str, *, hint: str = "") -> None:
    """Print a warning that -q does not silence."""
    complain(styled("warning: ", fg="yellow") + text)
    if hint:
        complain(f"  {hint}")


class _Taker(threading.local):
    take: Callable[[str], None] | None = None


_taker = _Taker()


@contextmanager
def lines_to(take: Callable[[str], None]) -> Iterator[None]:
    """Have this thread's lines for stdout and stderr taken, without colour, in place of being printed."""
    before, _taker.take = _taker.take, take
    try:
        yield
    finally:
        _taker.take = before


def taken(text: str) -> bool:
    """Give a line to who takes this thread's lines; return False if nobody does."""
    take = _taker.take
    if take is not None:
        take(click.unstyle(text))
    return take is not None


def complain(text: str, *, prose: bool = True) -> None:
    """Print a line to stderr; on a terminal ``prose`` is broken between words.

    A pipe that nobody reads any more is not an error, nor is a full disk: the exit code stays.
    """
    if taken(text):
        return
    try:
        click.echo(_broken(text) if prose and sys.stderr.isatty() else text, err=True)
    except OSError:
        redirect_to_null(sys.stderr)


def _broken(text: str) -> str:
    """Return the lines as the terminal of stderr has room for them; they go on at their own indent, or at that of a hint."""
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    # By number: what a screen puts in the place of sys.stderr has none. stdout may be no terminal.
    with suppress(OSError):
        width = width or os.get_terminal_size(2).columns
    lines = [(line, len(line) - len(line.lstrip()) or 2) for line in text.split("\n")]
    return "\n".join(part for line, indent in lines for part in wrapped_to(line, indent, width or 80))


def wrapped_to(text: str, indent: int, width: int) -> list[str]:
    """Return the lines of a text, no wider than ``width`` columns unless a single word is."""
    if len(text) <= width:
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


def redirect_to_null(stream: Any) -> None:
    """Send what is still written to ``stream`` to /dev/null, so that flushing it at the end of the process does not fail."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a test's buffer has no descriptor, and needs none
        return
    # The descriptor is replaced, not the stream: what the stream still has in its buffer is flushed at the
    # end of the process.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def shown_text(text: str) -> str:
    """Return a message on one line of printable characters."""
    try:
        return shown(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON of others may have, is no byte of a name.
        return shown(text.encode("utf-8", "backslashreplace"))


def json_name(key: str, path: bytes) -> dict[str, Any]:
    """Return ``{key: text}``, and ``{key}_base64`` with the exact bytes where they are not UTF-8 (the text then shows ``xNN``)."""
    try:
        return {key: path.decode("utf-8")}
    except UnicodeDecodeError:
        # Imported here: hardly any name is not UTF-8.
        import binascii

        text = path.decode("utf-8", "backslashreplace")
        return {key: text, f"{key}_base64": binascii.b2a_base64(path, newline=False).decode("ascii")}


def absolute(path: str | bytes) -> bytes:
    """Return the absolute path as bytes, without ``.`` and ``..``; symbolic links are not resolved.

    A path inside a snapshot need not exist now, so nothing is looked up.
    """
    return os.path.abspath(os.fsencode(path))

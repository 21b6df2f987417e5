"""Messages for the operator on stderr, which need nothing of the run's session.

Guarantees: colour only on a terminal and never with NO_COLOR; a reader of stderr that has gone is no error.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click


def styled(text: str, **style: Any) -> str:
    """Return the text in colour unless NO_COLOR is set; click removes the colour where stdout is no terminal."""
    given = {key: value for key, value in style.items() if value}
    return click.style(text, **given) if given and not os.environ.get("NO_COLOR") else text


def warn(text: str, *, hint: str = "") -> None:
    """Print a warning that -q does not silence."""
    complain(styled("warning: ", fg="yellow") + text)
    if hint:
        complain(f"  {hint}")


def complain(text: str) -> None:
    """Print a line to stderr. A pipe that nobody reads any more is not an error, nor is a full disk: the exit code stays."""
    try:
        click.echo(text, err=True)
    except OSError:
        redirect_to_null(sys.stderr)


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

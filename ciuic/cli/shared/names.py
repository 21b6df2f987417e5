"""Names as text: paths, which are bytes, for a terminal and for JSON.

Guarantees: what a terminal or a log gets is one line of printable characters, whatever the name contains (an escape
sequence in a file name must not drive the operator's terminal), and can be pasted back into bash or zsh; JSON keeps
every byte. Names that are plain are shown plainly.
"""

from __future__ import annotations

import base64
import os
from typing import Any

from ciuic.system.shell_quoting import shown as shown
from ciuic.units import plural as plural  # every command that shows names counts them, too


def shown_text(text: str) -> str:
    """Return a message on one line of printable characters."""
    return shown(text.encode("utf-8", "surrogateescape"))


def json_name(key: str, path: bytes) -> dict[str, Any]:
    """Return ``{key: text}``, and ``{key}_base64`` with the exact bytes where they are not UTF-8 (the text then shows ``xNN``)."""
    try:
        return {key: path.decode("utf-8")}
    except UnicodeDecodeError:
        text = path.decode("utf-8", "backslashreplace")
        return {key: text, f"{key}_base64": base64.b64encode(path).decode("ascii")}


def absolute(path: str | bytes) -> bytes:
    """Return the absolute path as bytes, without ``.`` and ``..``; symbolic links are not resolved.

    A path inside a snapshot need not exist now, so nothing is looked up.
    """
    return os.path.abspath(os.fsencode(path))

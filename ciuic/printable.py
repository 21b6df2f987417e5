"""Text of any origin on one line of printable characters, for messages, tables and logs.

`one_line` keeps what a terminal shows harmlessly; shells and service managers may act upon what is left. `ciuic.system.shell_quoting`
is for command lines. `escaped` and `shown_name` are for names that any user may have chosen: one line of ASCII letters, digits, blanks
and ``._@:+,=/-``, so that neither a terminal nor a shell nor a service manager finds anything in it to act upon, wherever an
operator's script puts it. Two different names are shown differently. Documents that programs read (JSON) keep the name as it is.
"""

from __future__ import annotations

import os
from typing import Final


def one_line(text: str | bytes) -> str:
    r"""Return the text with control and other unprintable characters escaped, and bytes that are no UTF-8 as ``\xNN``."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(map(_shown, text))


def path_text(path: str | bytes | os.PathLike[str]) -> str:
    r"""Return a path as text for a message or a document, with bytes that are no UTF-8 as ``\xNN``; it leads to no file then."""
    # Neither JSON nor MessagePack can hold what os.fsdecode makes of such bytes.
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _shown(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._@:+,=/-")


def escaped(text: str) -> str:
    r"""Escape every character outside of the alphabet, and each backslash, as Python does: ``\x3b``, ``\u20ac``."""
    return "".join(char if char in _PLAIN or char == " " else _escape(char) for char in text)


def shown_name(text: str) -> str:
    """Return a plain name as it is, and any other escaped and between single quotes, which a shell takes for one word."""
    # A leading dash would be taken for an option on a command line.
    plain = bool(text) and _PLAIN.issuperset(text) and not text.startswith("-")
    return text if plain else f"'{escaped(text)}'"


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

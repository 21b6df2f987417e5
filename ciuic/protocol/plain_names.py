"""Escape names that any user may have chosen, for terminals, logs, alerts and the command lines of hints.

Guarantees: the result is one line of ASCII letters, digits, blanks and ``._@:+,=/-``, so that neither a terminal nor a shell nor a
service manager finds anything in it to act upon, wherever an operator's script puts it. Two different names are shown
differently. Documents that programs read (JSON) keep the name as it is.
"""

from __future__ import annotations

import string
from typing import Final

_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "._@:+,=/-")


def escaped(text: str) -> str:
    r"""Escape every character outside of the alphabet, and each backslash, as Python does: ``\x3b``, ``\u20ac``."""
    return "".join(char if char in _PLAIN or char == " " else _escape(char) for char in text)


def shown_name(text: str) -> str:
    """Return a plain name as it is, and any other escaped and between single quotes, which a shell takes for one word."""
    # A leading dash would be taken for an option on a command line.
    plain = bool(text) and _PLAIN.issuperset(text) and not text.startswith("-")
    return text if plain else f"'{escaped(text)}'"


def trainer_key(name: str, where: str) -> str:
    """Return the key of alerts about one training; it stays the same when the training is started again."""
    return f"trainer:{escaped(name)}:{escaped(where)}"


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

"""How a name that any user may have chosen is shown: to a person, in a log, in an alert, on the command line of a hint.

Guarantees: what is shown has letters, digits, blanks and ``._@:+,=/-`` of ASCII alone, one line of it, so that neither a terminal nor
a shell nor a service manager finds anything in it to act upon, wherever an operator's script puts it. Two different names are
shown differently. Documents that programs read (JSON) keep the name as it is.
"""

from __future__ import annotations

import string
from typing import Final

_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "._@:+,=/-")


def escaped(text: str) -> str:
    """The name, each character outside of the alphabet (and each backslash) written as Python writes it: ``\\x3b``, ``\\u20ac``."""
    return "".join(char if char in _PLAIN or char == " " else _escape(char) for char in text)


def shown_name(text: str) -> str:
    """The name as it is if it is plain, else escaped and between single quotes, which a shell takes for one word."""
    plain = bool(text) and _PLAIN.issuperset(text) and not text.startswith("-")
    return text if plain else f"'{escaped(text)}'"


def trainer_key(name: str, where: str) -> str:
    """The key of alerts about one training: the same when it comes again."""
    return f"trainer:{escaped(name)}:{escaped(where)}"


def one_line(text: str) -> str:
    """A message, which may quote what a user's program said, without control characters and what else is not to be printed."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

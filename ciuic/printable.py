"""Text of any origin on one line of printable characters, for messages, tables and logs.

Shells and service managers may act upon what is left: `ciuic.protocol.plain_names` and `ciuic.system.shell_quoting` are for them.
"""

from __future__ import annotations


def one_line(text: str | bytes) -> str:
    r"""Return the text with control and other unprintable characters escaped, and bytes that are no UTF-8 as ``\xNN``."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")

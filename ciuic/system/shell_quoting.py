"""Paths as text on one line of printable characters, which can be pasted back into bash or zsh."""

from __future__ import annotations

# The quote and the backslash end or begin something inside $'…'.
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\x1b": "\\E", "'": "\\'", "\\": "\\\\"}


def shown(path: bytes) -> str:
    """Return the path as text, in bash's ``$'…'`` form if a character is not printable or the bytes are not UTF-8."""
    text = path.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return text
    return "$'" + "".join(map(_escaped, text)) + "'"


def word(argument: bytes) -> str:
    """Return an argument of a command line as bash and zsh take it for one word."""
    import shlex

    text = argument.decode("utf-8", "surrogateescape")
    return shlex.quote(text) if text.isprintable() else shown(argument)


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    # surrogateescape: a byte that is not UTF-8.
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable():
        return character
    # Bytes rather than \u: the shell's \u depends on its locale, \x does not.
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8"))

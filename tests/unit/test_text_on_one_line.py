"""Tests of text for one line of a message."""

from __future__ import annotations

from ciuic.printable import one_line


def test_any_name_fits_in_a_message() -> None:
    """Bytes that are not text, and control characters, are escaped on one line of a message; the rest stays."""
    assert one_line(b"/plain \xc3\xa9") == "/plain é"
    assert one_line(b"/\xc3\xa9\xff\n\x1b") == r"/é\xff\n\x1b"
    assert one_line("\udcff\u202e") == r"\udcff\u202e"

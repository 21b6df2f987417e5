"""JSON that another program may have written: decoded, or a ValueError, never an exception of the parser."""

from __future__ import annotations

import json
from typing import Any, Final

MAX_DOCUMENT_BYTES: Final = 1 << 30
"""Largest `state.json` or similar document (what is no tensor) that is read.

A file may claim any size: holes cost its writer nothing.
"""
MALFORMED: Final = (
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    RuntimeError,
)
"""Exceptions of making values from a document that is not as it should be; RuntimeError is torch's."""


def decode_json(data: bytes | bytearray | str, what: str) -> Any:
    """Decode a document.

    Args:
        data: The document.
        what: What errors call it.

    Raises:
        ValueError: The document is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None

"""Reading JSON that somebody else may have written: a value, or ValueError; never a traceback of the parser."""

from __future__ import annotations

import json
from typing import Any, Final

MAX_DOCUMENT_BYTES: Final = 1 << 30
"""Of `state.json` and the like, which hold what is no tensor. A file that claims more is not read: holes cost its writer nothing."""
MALFORMED: Final = (
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    RuntimeError,
)
"""What making values of a document raises that says something else than it should. RuntimeError is torch's."""


def decode_json(data: bytes | bytearray | str, what: str) -> Any:
    """The document. ValueError, naming it, for what is not JSON or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is no JSON: {error}") from None

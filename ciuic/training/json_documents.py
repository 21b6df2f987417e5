"""JSON that another program may have written: decoded, or a ValueError, never an exception of the parser."""

from __future__ import annotations

import errno
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
# Of _thread.start_new_thread (CPython), and of torch's c10/core/impl/alloc_cpu.cpp.
_SHORTAGES: Final = ("can't start new thread", "can't allocate memory")


def raise_shortage(error: BaseException) -> None:
    """Raise OSError where an exception tells that this process lacks memory or threads, and nothing of a document.

    Taken for damage, it would let an older state be loaded.
    """
    # By type as well: the texts of other errors have content of the document, which its writer chooses.
    is_short = isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES)
    if is_short or isinstance(error, MemoryError):
        raise OSError(
            errno.ENOMEM, f"there is not enough memory, or there are too many threads: {error}"
        ) from error


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

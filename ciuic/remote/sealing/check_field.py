"""Last field of a JSON object that people read, ``check``: hexadecimal digits over the bytes before it.

It stands in the JSON itself, so that the object stays one JSON document, and covers the bytes as they are
written, so that no reader has to know in which form another one writes JSON.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from typing import Final

import xxhash

from ciuic.remote.errors import DamagedRemote

_CHECK: Final = re.compile(rb'(\{.*),"check":"([0-9a-f]{16,64})"\}\n?\Z', re.DOTALL)
Check = Callable[[bytes], str]
"""Returns the hexadecimal digits of the check over these bytes."""


def xxh3_check(data: bytes) -> str:
    """Return XXH3-64, which guards against decay and typing errors."""
    return xxhash.xxh3_64_hexdigest(data)


def add_check(document: bytes, check: Check) -> bytes:
    """Return the JSON object with ``check`` as its last field, and a line end."""
    body = document[:-1]
    return body + b',"check":"%s"}\n' % check(body).encode()


def split_check(name: str, data: bytes, check: Check) -> bytes:
    """Return the JSON object without ``check``.

    Raises:
        DamagedRemote: there is none, or it is not that of these bytes.
    """
    found = _CHECK.match(data)
    if found is None or not hmac.compare_digest(check(found[1]).encode(), found[2]):
        raise DamagedRemote(name, "it does not match its check")
    return found[1] + b"}"

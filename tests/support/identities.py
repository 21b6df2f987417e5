"""Identities of repositories for tests that hold for each of them."""

from __future__ import annotations

from typing import Final

import pytest

from ciuic.repository import Identity

SEED: Final = 0xFEDCBA9876543210
SEEDED: Final = Identity("xxh3-128", None, SEED)
KEYED: Final = Identity("blake3-128", bytes(range(100, 132)), SEED)
IDENTITIES: Final = (pytest.param(None, id="xxh3"), pytest.param(KEYED, id="blake3"))
"""None, with which `Repository.create` makes what it makes by default, and that of a format-3 repository."""

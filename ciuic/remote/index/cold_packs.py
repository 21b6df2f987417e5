"""Packs that were moved to a colder storage class or place: those whose tables have copies below ``tables/``."""

from __future__ import annotations

from ciuic.remote.format.names import TABLES_PREFIX, PackRef, parse_table
from ciuic.remote.objects.model import Objects


def cold_packs(objects: Objects) -> dict[PackRef, int]:
    """Return the packs that are cold, or were about to become so, with the time of the copy by the store's clock. One LIST."""
    return {
        ref: info.modified_ns
        for info in objects.list(TABLES_PREFIX)
        if (ref := parse_table(info.name)) is not None
    }

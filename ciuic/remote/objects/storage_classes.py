"""Storage classes of objects: what each store has, how cold it is, and how long a thaw takes.

Names and times are as the stores' documentation has them; nothing but advice and messages depends on them,
except the order of classes: nothing is ever moved to a warmer one.

References:
    Amazon S3 User Guide, "Understanding and managing Amazon S3 storage classes", "Understanding archive retrieval options";
    Azure Blob Storage, "Access tiers for blob data", "Blob rehydration from the archive tier"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, Protocol

from ciuic.errors import UsageError

ThawSpeed = Literal["standard", "bulk", "expedited"]
"""Speed and price of a thaw, in the words of Amazon S3."""
THAW_SPEEDS: Final[tuple[ThawSpeed, ...]] = ("standard", "bulk", "expedited")


class StorageClass(NamedTuple):
    """Facts of a storage class."""

    coldness: int
    """Order among the classes of one store; the default one has 0."""
    thaw_hours: Mapping[ThawSpeed, float]
    """Hours until an object can be read, by the speed that was asked for; empty for a class that is read at once."""

    @property
    def is_archive(self) -> bool:
        """True if objects have to be thawed before they can be read."""
        return bool(self.thaw_hours)


_S3: Final = {
    "STANDARD": StorageClass(0, {}),
    "INTELLIGENT_TIERING": StorageClass(0, {}),
    "STANDARD_IA": StorageClass(1, {}),
    "ONEZONE_IA": StorageClass(1, {}),
    "GLACIER_IR": StorageClass(2, {}),
    "GLACIER": StorageClass(3, {"expedited": 0.1, "standard": 5, "bulk": 12}),
    "DEEP_ARCHIVE": StorageClass(4, {"standard": 12, "bulk": 48}),
}
_AZURE: Final = {
    "HOT": StorageClass(0, {}),
    "COOL": StorageClass(1, {}),
    "COLD": StorageClass(2, {}),
    "ARCHIVE": StorageClass(3, {"expedited": 1, "standard": 15}),
}
CLASSES: Final[Mapping[str, Mapping[str, StorageClass]]] = {
    "s3": _S3,
    "az": _AZURE,
}
"""Classes of each scheme of URLs, by their names in capitals."""


def find_class(scheme: str, name: str) -> StorageClass:
    """Return the facts of a storage class; its name in any case, empty for the default one.

    Raises:
        UsageError: the store has none of this name.
    """
    known = CLASSES.get(scheme, {})
    if not name:
        return StorageClass(0, {})
    if name.upper() not in known:
        there = ", ".join(known) or "none"
        raise UsageError(f"{scheme}:// has no storage class {name!r}", hint=f"there is: {there}")
    return known[name.upper()]


class ObjectClass(NamedTuple):
    """Storage class of one object, and whether it can be read."""

    name: str
    """Class in capitals; empty for the default one."""
    state: Literal["ready", "archived", "thawing"]


class ListedClass(NamedTuple):
    """Line of a listing with storage classes."""

    name: str
    storage_class: str
    """Class in capitals; empty for the default one."""
    is_thawed: bool = False
    """True for an object that a thaw has moved to a warm class not long ago: rules leave it there."""


class ObjectClasses(Protocol):
    """Storage classes of the objects below a remote's prefix.

    Methods raise RemoteUnreachable and RemoteRefused, as `Objects` do. They may be called from several threads at once.
    """

    @property
    def scheme(self) -> str:
        """Scheme of the remote's URL, whose classes `find_class` knows."""

    def list(self, prefix: str) -> Iterator[ListedClass]:
        """Yield the objects whose names begin with ``prefix``."""

    def look(self, name: str) -> ObjectClass:
        """Return the class of an object. NoSuchObject if there is none."""

    def change(self, name: str, storage_class: str) -> None:
        """Move an object to another class within the store; durable on return.

        Raises:
            NoSuchObject: there is none.
            ArchivedObject: it has to be thawed first.
        """

    def thaw(self, name: str, speed: ThawSpeed, days: int) -> None:
        """Ask the store to make an archived object readable for some days. Asking again is allowed, and changes nothing.

        Raises:
            NoSuchObject: there is none.
        """

"""Storage classes of the objects in the space of one repository within a remote."""

from __future__ import annotations

from collections.abc import Iterator

from ciuic.remote.objects.storage_classes import ListedClass, ObjectClass, ObjectClasses, ThawSpeed
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_repository import SpaceReader


class SpaceClasses:
    """`ObjectClasses` of the objects whose names begin with a prefix, which is left out of them."""

    def __init__(self, classes: ObjectClasses, prefix: str) -> None:
        self._classes = classes
        self._prefix = prefix

    @property
    def scheme(self) -> str:
        """Scheme of the remote's URL."""
        return self._classes.scheme

    def list(self, prefix: str) -> Iterator[ListedClass]:
        """Yield name and storage class."""
        for found in self._classes.list(self._prefix + prefix):
            yield found._replace(name=found.name[len(self._prefix) :])

    def look(self, name: str) -> ObjectClass:
        """Return the class of an object."""
        return self._classes.look(self._prefix + name)

    def change(self, name: str, storage_class: str) -> None:
        """Move an object to another class."""
        self._classes.change(self._prefix + name, storage_class)

    def thaw(self, name: str, speed: ThawSpeed, days: int) -> None:
        """Ask for an archived object."""
        self._classes.thaw(self._prefix + name, speed, days)


def prefix_of(opened: ReadableRemote, reader: SpaceReader) -> str:
    """Return what precedes the names of a space in those of its remote: nothing for the remote itself."""
    below = reader.space.objects.url[len(opened.remote.objects.url) :].strip("/")
    return f"{below}/" if below else ""


def classes_of_spaces(
    opened: ReadableRemote, classes: ObjectClasses
) -> list[tuple[SpaceReader, ObjectClasses]]:
    """Return each space of a remote with its storage classes."""
    return [(reader, SpaceClasses(classes, prefix_of(opened, reader))) for reader in opened.readers]

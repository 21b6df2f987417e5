"""Names of a file that a successor reads from the journal of a killed worker."""

from __future__ import annotations

import itertools
import stat

import pytest

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.inherited_session import InheritedSession

_FILE, _FOLDER = 7, 2


def _several(name: bytes) -> bytes:
    return records.name_record(_FILE, _FOLDER, name, several=True)


@pytest.mark.parametrize("told", list(itertools.permutations([b"x", b"y"])))
def test_a_name_that_is_told_again_is_one_name(told: tuple[bytes, bytes]) -> None:
    """A name that the journal records twice counts once, in any order: a rename or a removal leaves nothing of it."""
    found = InheritedSession()
    data = b"".join(
        [
            records.node_record(_FILE, 1, _FILE, _FOLDER, stat.S_IFREG, b"a"),
            *map(_several, told),
            records.unlinked_record(_FILE, _FOLDER, b"a", gone=False),
            *map(_several, told),
            records.renamed_record(_FILE, _FOLDER, b"x", _FOLDER, b"z"),
            records.unlinked_record(_FILE, _FOLDER, b"z", gone=False),
        ]
    )
    for _ in found.apply(data):
        pass
    node = found.node(_FILE)
    assert node is not None
    assert (node.name, node.aliases) == ((_FOLDER, b"y"), set())

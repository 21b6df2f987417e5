"""Check of a version: is this the object of its name, as ciuic stored it?

With a key the answer is sure. Without one it says that the bytes are well-formed, which anybody can make them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from ciuic.errors import Damaged, UsageError
from ciuic.remote.errors import WrongKey
from ciuic.remote.format.log_entry import decode_log_entry
from ciuic.remote.format.manifest import decode_manifest
from ciuic.remote.format.names import (
    REMOTE_JSON,
    parse_log_entry,
    parse_manifest,
    parse_pack,
    parse_round,
    parse_slot,
)
from ciuic.remote.format.pack_reader import RemotePackReader, TableSource
from ciuic.remote.format.remote_json import open_remote
from ciuic.remote.format.round import decode_round
from ciuic.remote.sealing.key_slot import decode_slot
from ciuic.remote.sealing.master_key import MasterKey
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.errors import UnsupportedFormat

_SPACE: Final = re.compile(r"repositories/([0-9a-f]{32})/(.*)\Z", re.DOTALL)


class VersionCheck:
    """Verifies objects of one remote and of all spaces in it.

    Args:
        remote_id: Id of the remote, 16 bytes.
        master: Master key; None for a remote in clear.
    """

    def __init__(self, remote_id: bytes, master: MasterKey | None) -> None:
        self._remote_id = remote_id
        self._master = master

    def flaw(self, name: str, data: bytes) -> str:
        """Return what is wrong with the whole object; an empty text for a sound one, or a name that is not ours."""
        space, rest = self._space(name)
        return _flaw(lambda: self._check(space, rest, data))

    def flaw_of_table(self, name: str, objects: TableSource) -> str:
        """Return what is wrong with the table of a pack, which ``objects`` reads by its name in the space."""
        space, rest = self._space(name)
        ref = parse_pack(rest)
        assert ref is not None
        pack = RemotePackReader(Sealer(space, self._master), ref)
        return _flaw(lambda: pack.read_table_once(objects))

    def sealer_of(self, name: str) -> Sealer:
        """Return the seals of the space that a name belongs to."""
        return Sealer(self._space(name)[0], self._master)

    def _space(self, name: str) -> tuple[bytes, str]:
        return split_space(name, self._remote_id)

    def _check(self, space: bytes, name: str, data: bytes) -> None:
        sealer = Sealer(space, self._master)
        if name == REMOTE_JSON:
            open_remote(data, self._master, expected_id=space)
        elif slot := parse_slot(name):
            decode_slot(slot, data)
        elif entry := parse_log_entry(name):
            decode_log_entry(sealer, entry.writer, entry.number, data)
        elif round_ := parse_round(name):
            decode_round(sealer, round_.round, round_.part, data)
        elif parse_manifest(name) is not None:
            decode_manifest(sealer, name, data)
        elif ref := parse_pack(name):
            RemotePackReader(sealer, ref).check(data)


def split_space(name: str, remote_id: bytes) -> tuple[bytes, str]:
    """Return the id of the space that an object belongs to, 16 bytes, and its name there."""
    found = _SPACE.match(name)
    return (bytes.fromhex(found[1]), found[2]) if found else (remote_id, name)


def _flaw(check: Callable[[], object]) -> str:
    try:
        check()
    # A version number is not sealed: anybody can write a later one.
    except (Damaged, UnsupportedFormat, WrongKey, UsageError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""

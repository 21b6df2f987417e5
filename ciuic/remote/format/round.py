"""Objects of a collector's round, sealed JSON.

References:
    docs/remote-format.md, section 8
"""

from __future__ import annotations

import msgspec

from ciuic.remote.format.document import decode_document, encode_document
from ciuic.remote.format.log_entry import ManifestNames, PackRefs
from ciuic.remote.format.names import HexId, RoundPart, round_name
from ciuic.remote.sealing.sealer import Sealer


class StoredRound(msgspec.Struct, frozen=True, kw_only=True):
    """Packs and manifests that a round condemns; in ``.final`` those that it deletes; in ``.done`` none."""

    nonce: HexId
    condemned: PackRefs = ()
    manifests: ManifestNames = ()


def encode_round(sealer: Sealer, round_: int, part: RoundPart, content: StoredRound) -> bytes:
    """Return the bytes of an object of a round. ValueError for one that cannot be read back."""
    return encode_document(sealer, round_name(round_, part), content, StoredRound)


def decode_round(sealer: Sealer, round_: int, part: RoundPart, data: bytes) -> StoredRound:
    """Return the content of an object of a round.

    Raises:
        DamagedRemote: it does not open, or is no round.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return decode_document(sealer, round_name(round_, part), data, StoredRound)

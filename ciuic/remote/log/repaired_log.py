"""Sum up a damaged log, so that its damaged entries count for nothing any more.

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.log_entry import LogState
from ciuic.remote.format.names import log_entry_name, new_hex_id
from ciuic.remote.log.bounded import create_entry, read_entry, read_object
from ciuic.remote.log.log_summary import LogSummary
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects
from ciuic.remote.sealing.sealer import Sealer


def sum_up_log(
    objects: Objects,
    sealer: Sealer,
    writer: str,
    summary: LogSummary,
    removed_anywhere: Collection[str],
    *,
    new_id: Callable[[], str] = new_hex_id,
) -> bool:
    """Append an entry to a log that says everything ``summary`` has; True if it stands.

    False: the log has another end than ``summary`` knows, and has to be read again.

    Args:
        objects: The remote.
        sealer: Its seals.
        writer: Name of the log.
        summary: All that is known of the log, up to its end.
        removed_anywhere: Manifests that any log removed.
        new_id: For tests.
    """
    live = [one for name, one in sorted(summary.committed.items()) if name not in removed_anywhere]
    entry = LogState(
        nonce=new_id(),
        live=tuple(live),
        removed=tuple(sorted(summary.removed)),
        given_up=summary.kept_given_up(),
    )
    before = _last(objects, writer, summary.next - 1)
    if before is None:
        return False
    if not create_entry(objects, sealer, writer, summary.next, entry):
        try:
            if read_entry(objects, sealer, writer, summary.next).nonce != entry.nonce:
                return False
        except (NoSuchObject, DamagedRemote):
            return False
    # Not by its nonce, as elsewhere: the last entry may be the damaged one. While it is there as it was, the new name
    # had not been deleted before.
    return _last(objects, writer, summary.next - 1) == before


def _last(objects: Objects, writer: str, number: int) -> bytes | ObjectInfo | None:
    """Return what tells whether the object is still there as it was; None if it is not there."""
    name = log_entry_name(writer, number)
    try:
        return read_object(objects, name)
    except NoSuchObject:
        return None
    except DamagedRemote:
        # Too large to be read, or a web page that somebody stored.
        return objects.info(name)

"""Look at a remote: whether it still is what this host left, before anything is removed because it is stored there.

What is compared is what an upload compares when it begins: the id of the remote, and the last entry of this host's log. A bucket
that went back to an older state, was emptied or was replaced lacks it. One remote.json, one key slot, a LIST and a GET.

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

from pathlib import Path

from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.protocol.stored_remotely import StoredRecord
from ciuic.remote.access import configured_objects, configured_secrets, open_configured, repository_space
from ciuic.remote.documents import MAX_REMOTE_JSON_BYTES, read_document, read_remote_id
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.object_names import REMOTE_JSON
from ciuic.remote.objects.model import NoSuchBucket, Objects, RemoteUnreachable
from ciuic.remote.writer_log import WriterState, read_end
from ciuic.repository import Repository


def look_at(
    config: RemoteConfig, repository: Repository, record: StoredRecord, state_dir: Path
) -> str | None:
    """Return why a remote may lack what is recorded as stored there; empty if it has it.

    None: nobody could look, because this user has no way into the remote or no right to what this host remembers of it.

    Args:
        config: The remote's part of the configuration.
        repository: Repository whose snapshots are meant.
        record: What is recorded.
        state_dir: State directory of the process that uploads.
    """
    try:
        objects = configured_objects(config)
        try:
            _require_as_left(config, objects, repository, record, state_dir)
        finally:
            objects.close()
    # A wrong key is none of these: who replaced the remote was found out by its id.
    except (RemoteUnreachable, Damaged, NotFound, NoSuchBucket) as error:
        return f"nothing is removed because it is stored there: {error.message}"
    except (CiuicError, OSError):
        return None
    return ""


def _require_as_left(
    config: RemoteConfig, objects: Objects, repository: Repository, record: StoredRecord, state_dir: Path
) -> None:
    found = read_document(objects, REMOTE_JSON, read_remote_id, MAX_REMOTE_JSON_BYTES).hex()
    if record.remote not in ("", found):
        raise DamagedRemote(REMOTE_JSON, f"another remote, {found}, is in the place of {record.remote}")
    remote = open_configured(config, objects, configured_secrets(config))
    space = repository_space(remote, repository, make=False)
    known = WriterState(str(state_dir / config.name / space.id / "writer")).load()
    if known is None:
        raise NotFound(f"this host does not remember what it stored in {config.url}")
    read_end(space.objects, space.sealer, known)

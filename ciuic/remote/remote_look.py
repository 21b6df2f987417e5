"""Look at a remote: whether it still is what this host left, before anything is removed because it is stored there.

What is compared is what an upload compares when it begins: the id of the remote, the last entry of this host's log, packs and manifests. A
bucket that went back to an older state, was emptied or was replaced lacks the entry; one in which somebody deleted objects lacks packs or
manifests. One remote.json, one key slot, a GET and a LIST, and a LIST for each thousand packs and each thousand manifests.

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.protocol.stored_remotely import StoredRecord, StoredRecordDamaged, read_record, upload_state_dir
from ciuic.remote.access import configured_objects, configured_secrets, open_configured, repository_space
from ciuic.remote.documents import MAX_REMOTE_JSON_BYTES, read_document, read_remote_id
from ciuic.remote.errors import DamagedRemote, PacksElsewhere
from ciuic.remote.log_reader import naming_memory
from ciuic.remote.object_names import REMOTE_JSON, log_entry_name
from ciuic.remote.objects.model import NoSuchBucket, Objects, RemoteRefused, RemoteUnreachable
from ciuic.remote.stored_facts import lost_objects, read_known_packs
from ciuic.remote.writer_log import WriterState, is_readable_end, read_end
from ciuic.repository import Repository
from ciuic.units import plural


def looks(
    remotes: Iterable[RemoteConfig],
    repository: Repository,
    *,
    away: bool = True,
    waiting: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> dict[str, str]:
    """Look at the remotes that are recorded to have something of a repository.

    Args:
        remotes: The remotes of the configuration.
        repository: The repository.
        away: Count one that does not answer among those that may lack something; otherwise nobody could look.
        waiting: Returns what is entered while the remote of this name is looked at, which may take long.

    Returns:
        By name, why a remote may lack what is recorded as stored there; empty if it has it. Without those at which nobody could look,
        because this user has no way into the remote or no right to what this host remembers of it.
    """
    found = {}
    for remote in remotes:
        # Whoever asks for the record hears that it cannot be read.
        with suppress(StoredRecordDamaged):
            record = read_record(remote.name)
            if record is None or record.repository != repository.id or not record.is_of(remote):
                continue
            if record.stored | record.passed_over:
                with waiting(remote.name):
                    answer = look_at(remote, repository, record, upload_state_dir(), away=away)
                if answer is not None:
                    found[remote.name] = answer
    return found


def look_at(
    config: RemoteConfig,
    repository: Repository,
    record: StoredRecord,
    state_dir: Path,
    *,
    away: bool = True,
) -> str | None:
    """Return why a remote may lack what is recorded as stored there; empty if it has it.

    None: nobody could look, because this user has no way into the remote or no right to what this host remembers of it.

    Args:
        config: The remote's part of the configuration.
        repository: Repository whose snapshots are meant.
        record: What is recorded.
        state_dir: State directory of the process that uploads.
        away: As in `looks`.
    """
    try:
        objects = configured_objects(config)
        try:
            _require_as_left(config, objects, repository, record, state_dir)
        finally:
            objects.close()
    # A wrong key is none of these: who replaced the remote was found out by its id. Nor is a lack of credentials; a store that refuses
    # those that there are may have been told to.
    except (RemoteUnreachable, RemoteRefused, Damaged, NotFound, NoSuchBucket, PacksElsewhere) as error:
        if isinstance(error, RemoteUnreachable) and not away:
            return None
        return f"nothing counts as stored there: {error.message}"
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
    directory = str(state_dir / config.name / space.id)
    known = WriterState(f"{directory}/writer").load()
    if known is None:
        raise NotFound(f"this host does not remember what it stored in {config.url}")

    # Imported where it is needed, after a fault: the module is large.
    def lacks() -> str:
        from ciuic.remote.stored_facts import lacking_words

        return lacking_words(space, directory, repository)

    with naming_memory(directory, lacks):
        end, last = read_end(space.objects, space.sealer, known)
    if not is_readable_end(known, end, last):
        raise DamagedRemote(
            log_entry_name(known.writer, end), "the last entry of this host's log cannot be read"
        )
    if not record.stored:
        return
    # As above: a remote that has something is looked at by a command that removes.
    from ciuic.remote.stored_facts import stored_manifests

    packs = read_known_packs(directory)
    if packs is None:
        raise NotFound(f"this host does not remember which packs are in {config.url}; an upload reads them")
    lost = lost_objects(space.objects, space.sealer, packs, stored_manifests(directory, record.stored))
    for number, what in ((len(lost.manifests), "manifest"), (len(lost.packs), "pack")):
        if number:
            raise Damaged(
                f"it lacks {plural(number, what)} that it had; an upload finds out what that means, and stores it again where it can"
            )
    if lost.given_up:
        raise Damaged(
            f"a collection removed {plural(len(lost.given_up), 'manifest')} of snapshots that were given up there; "
            "the next upload takes note of them"
        )

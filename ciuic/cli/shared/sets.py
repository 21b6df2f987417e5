"""Sets in commands that read: which are there, what a name of one means, and what may be restored of it.

Guarantees: what is restored is of a set that is whole in what is read, or in a configured remote, unless ``--incomplete``
was given; the refusal names the members that are missing. What is missing is said of the repository or remote that was read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown_text, warn
from ciuic.cli.shared.session import Session
from ciuic.errors import CiuicError, Damaged, NotFound, UsageError
from ciuic.repository.snapshot_sets import (
    SET_MARK,
    SnapshotSet,
    named_set,
    parse_set_name,
    sets_of,
    shown_members,
)

if TYPE_CHECKING:
    from ciuic.types import SetMember, Snapshot, SnapshotId

PLACE = Keys("id, name, member, members")
SET = Keys(
    "id, name, members (each `member`, `snapshot` and `host`, null where it is missing), whole, lacking (members), size_bytes",
    "`show set:NAME`",
)

_MAX_NAME_BYTES: Final = 255
"""NAME_MAX of the file systems of Linux."""


def own_name() -> str:
    """Return the name that snapshots have for this host."""
    return os.uname().nodename


def set_named(session: Session, text: str) -> SnapshotSet | None:
    """Return the set that ``set:…`` names; None if the text names a snapshot.

    Raises:
        NotFound: there is no such set.
        Damaged: there is none among the snapshots that can be read, and there are others.
        UsageError: it could be several.
    """
    named = parse_set_name(text)
    if named is None or named.member:
        return None
    return _named(session, named.name, found_sets(session))


def _named(session: Session, name: str, sets: Sequence[SnapshotSet]) -> SnapshotSet:
    try:
        return named_set(name, sets)
    except NotFound as error:
        unreadable = session.snapshots.unreadable()
        if not unreadable:
            raise
        # Its members may be among these: only they know of which set they are.
        raise Damaged(
            f"{error.message}, but {plural(len(unreadable), 'snapshot')} cannot be read: "
            f"{unreadable[0].path}: {unreadable[0].reason}",
            hint=error.hint,
        ) from None


def found_sets(session: Session) -> list[SnapshotSet]:
    """Return the sets in what the session reads, newest first.

    Raises:
        UsageError: the session reads one host alone.
    """
    if session.as_host is not None:
        raise UsageError(
            "--as-host reads the snapshots of one host, and a set is of several",
            hint=f"leave it out; HOST/{SET_MARK}NAME is the snapshot of one host",
        )
    return session.snapshots.sets()


def expanded(session: Session, texts: Sequence[str]) -> tuple[list[SnapshotId], list[SnapshotSet]]:
    """Return the snapshots that the texts name, each once, in order, with all that are here of a set; and the sets."""
    ids: list[SnapshotId] = []
    sets = []
    for text in texts:
        found = set_named(session, text)
        if found is None:
            ids.append(session.snapshots.resolve(text))
        else:
            sets.append(found)
            ids += [snapshot.id for snapshot in found.found.values()]
    return list(dict.fromkeys(ids)), sets


def resolve_all(session: Session, texts: Sequence[str]) -> list[SnapshotId]:
    """Return the snapshots that the texts name; as `expanded`."""
    return expanded(session, texts)[0]


def state_named(session: Session, text: str) -> SnapshotId:
    """Return the snapshot of a training's state that a text names; of a set any that is found, which stands for all."""
    found = set_named(session, text)
    return session.snapshots.resolve(text) if found is None else found.newest.id


def warn_of_lacking(session: Session, found: SnapshotSet) -> None:
    """Warn of the members of a set that are not in what is read."""
    if found.is_whole:
        return
    verb = "is" if len(found.lacking) == 1 else "are"
    warn(
        f"{shown_text(found.described())} is not whole here: {shown_text(shown_members(found.lacking))} {verb} missing",
        hint=_elsewhere(session),
    )


def for_restore(session: Session, text: str, *, incomplete: bool) -> SnapshotSet | None:
    """Return the set that ``set:…`` names and that may be restored from; None if the text names no set.

    Args:
        session: The session. Where it reads the repository of this host, configured remotes say whether the other
            members are stored.
        text: Name of a snapshot or set.
        incomplete: Allow a set of which members are missing.

    Raises:
        NotFound: there is no such set, or members are missing.
        Damaged: there is none among the snapshots that can be read, and there are others.
        UsageError: it could be several.
    """
    named = parse_set_name(text)
    if named is None:
        return None
    if incomplete:
        return _named(session, named.name, found_sets(session))
    here = found_sets(session)
    asks_remotes = session.remote_url is None and not session.names_repository
    if any(one.is_whole for one in here if named.name == one.name) or not asks_remotes:
        return _whole(session, _named(session, named.name, here))
    # The newest here may be one that other hosts never committed: which one is whole, all of them together say.
    everywhere, problems = _with_remotes(session)
    chosen = _whole(session, _named(session, named.name, everywhere), problems)
    mine = next((one for one in here if (one.id, one.members) == (chosen.id, chosen.members)), None)
    if mine is None:
        raise NotFound(
            f"{chosen.described()} is whole in the remote, and none of it is in the repository of this host",
            hint=_elsewhere(session),
        )
    return mine


def _with_remotes(session: Session) -> tuple[list[SnapshotSet], list[str]]:
    """Return the sets of this host's repository and all configured remotes together, and what could not be read."""
    snapshots = session.snapshots.load_all()[0]
    problems = []
    for remote in session.config.remotes:
        other = Session(
            config_option=session.config_option,
            remote_option=remote.url,
            ignores_environment=True,
            verbosity=session.verbosity,
            now_ns=session.now_ns,
        )
        try:
            snapshots += other.snapshots.load_all()[0]
        except CiuicError as error:
            problems.append(f"{remote.name} cannot be read: {error.message}")
        finally:
            other.close()
    return sets_of(snapshots), problems


def _whole(session: Session, found: SnapshotSet, problems: Sequence[str] = ()) -> SnapshotSet:
    """Return the set; raise NotFound if it is not whole."""
    if found.is_whole:
        return found
    number = f"{len(found.found)} of {plural(len(found.members), 'member')}"
    raise NotFound(
        "\n".join(
            [
                f"{found.described()} is not whole: {number} found; missing: {shown_members(found.lacking)}",
                *problems,
            ]
        ),
        hint=f"{_elsewhere(session)}; --incomplete restores what there is",
    )


def _elsewhere(session: Session) -> str:
    if session.remote_url is None:
        return "--repo URL reads a remote, which has what all hosts have uploaded"
    return "ciuic remote status on its hosts says what is not uploaded yet"


def own_member(session: Session, found: SnapshotSet) -> Snapshot:
    """Return the snapshot of this host.

    Raises:
        NotFound: this host is not of the set, or its snapshot is missing.
        UsageError: several are of this host.
    """
    # The repository of this host, where the member may have any name.
    if session.remote_url is None and len(found.found) == 1:
        return next(iter(found.found.values()))
    return found.member_snapshot(own_name())


def is_of_this_host(session: Session, found: SnapshotSet, member: str) -> bool:
    """Return whether a member is this host's own, and may be restored in its place."""
    try:
        return own_member(session, found).id == found.member_snapshot(member).id
    except CiuicError:
        return False


def directory_names(found: SnapshotSet) -> dict[str, Snapshot]:
    """Return the snapshots by names of directories, which are the names of the members.

    Raises:
        UsageError: a name is none that a directory can have.
    """
    for member in found.found:
        # No host begins with a dot; `..` and directories of ciuic do.
        if "/" in member or member.startswith(".") or len(os.fsencode(member)) > _MAX_NAME_BYTES:
            raise UsageError(
                f"no directory can have the name of the member {member!r}",
                hint="--member restores one at a time, into a directory of any name",
            )
    return dict(found.found)


def set_document(place: SetMember | None) -> dict[str, Any] | None:
    """Return a place in a set as JSON has it."""
    return None if place is None else PLACE.of(place)


def document(found: SnapshotSet) -> dict[str, Any]:
    """Return a set in JSON."""
    here = {member: found.found.get(member) for member in found.members}
    members = [
        {"member": member, "snapshot": one and one.id, "host": one and one.host}
        for member, one in here.items()
    ]
    return SET.of(found, members=members, whole=found.is_whole)

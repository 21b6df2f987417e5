"""Rules of tiers: which snapshots are old enough, and which packs they alone need. Pure work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ciuic.config import TierRule
from ciuic.remote.collection.marking import LiveChunks, live_groups
from ciuic.remote.format.names import PackRef, split_ref
from ciuic.remote.index.remote_index import RemoteIndex
from ciuic.remote.objects.storage_classes import find_class

FILES_JOB: Final = "files"
"""Job in the names of manifests of snapshots of files; every other one is that of a training."""


class AgedSnapshot(NamedTuple):
    """Facts of a snapshot that rules look at."""

    manifest: str
    """Name of its manifest."""
    host: str
    job: str
    time_ns: int
    """Time of its cut by the clock of its host."""


def old_snapshots(rule: TierRule, snapshots: Sequence[AgedSnapshot], now_ns: int) -> set[str]:
    """Return the manifests of the snapshots that the rule lets become cold.

    Args:
        rule: The rule.
        snapshots: All snapshots that exist.
        now_ns: Time now.
    """
    since_ns = now_ns - rule.after_seconds * 10**9
    lines: dict[tuple[str, str], list[AgedSnapshot]] = {}
    for snapshot in snapshots:
        lines.setdefault((snapshot.host, snapshot.job), []).append(snapshot)
    old: set[str] = set()
    for (_, job), line in lines.items():
        if rule.kind != "all" and (rule.kind == "files") != (job == FILES_JOB):
            continue
        line.sort(key=lambda snapshot: (snapshot.time_ns, snapshot.manifest), reverse=True)
        old.update(one.manifest for one in line[rule.keep_newest :] if one.time_ns <= since_ns)
    return old


def cold_targets(
    index: RemoteIndex,
    live: LiveChunks,
    warm: Sequence[LiveChunks],
    rules: Sequence[TierRule],
    *,
    scheme: str,
) -> dict[PackRef, TierRule]:
    """Return the rule for each data pack that may become cold: the one with the coldest class.

    A pack without any live chunk is left to the collection.

    Args:
        index: Index of the remote.
        live: Chunks that snapshots need, bases included.
        warm: For each rule, the chunks that other snapshots than its old ones need, bases included.
        rules: The rules.
        scheme: Scheme of the remote's URL.
    """
    needed: set[int] = set()
    # Bit n of a pack's number: rule n keeps it warm.
    kept_warm: dict[int, int] = {}
    for chunk, copies in live_groups(index, live):
        bits = sum(1 << at for at, chunks in enumerate(warm) if chunk in chunks)
        for copy in copies:
            needed.add(copy.pack)
            kept_warm[copy.pack] = kept_warm.get(copy.pack, 0) | bits
    coldest = sorted(
        range(len(rules)), key=lambda at: find_class(scheme, rules[at].storage_class).coldness, reverse=True
    )
    targets: dict[PackRef, TierRule] = {}
    for number in needed:
        ref = index.ref(number)
        allowed = [at for at in coldest if not kept_warm[number] >> at & 1]
        if allowed and split_ref(ref)[0] == "data":
            targets[ref] = rules[allowed[0]]
    return targets


def colder(
    targets: Mapping[PackRef, TierRule], classes: Mapping[PackRef, str], *, scheme: str
) -> dict[PackRef, str]:
    """Return the new class of each pack that is to move: to a colder class than it has, and not out of an archive.

    Args:
        targets: Rule for each pack that may become cold.
        classes: Storage class that each pack has now; empty for the default one. Packs that are left out are not there.
        scheme: Scheme of the remote's URL.
    """
    moves: dict[PackRef, str] = {}
    for ref, rule in targets.items():
        if ref not in classes:
            continue
        has = find_class(scheme, classes[ref])
        # What is archived cannot be copied before it is thawed, which costs more than it saves.
        if not has.is_archive and has.coldness < find_class(scheme, rule.storage_class).coldness:
            moves[ref] = rule.storage_class.upper()
    return moves


def check_rules(rules: Iterable[TierRule], scheme: str) -> None:
    """Raise UsageError for a storage class that stores of this scheme do not have."""
    for rule in rules:
        find_class(scheme, rule.storage_class)

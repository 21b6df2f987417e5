"""Choice of one snapshot of a training by step, epoch or metric.

Guarantees: what is returned has what was asked for, and no other snapshot of the training has it too; else
`NotFound` says which there are. Of equally good snapshots the oldest is the best, as the rule `Best` keeps it.
A snapshot whose facts cannot be read is no candidate, which is logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ciuic.errors import NotFound, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.training.format.reading import SavedSnapshot, saved_snapshots
from ciuic.training.policy.policies import Mode
from ciuic.training.policy.retention_rules import Best, RetentionCandidate, best_of
from ciuic.training.util.logs import log
from ciuic.types import SnapshotId
from ciuic.units import plural

BEST: Final = "best"
"""Name by which the best snapshot is asked for beside ids."""
_SHOWN: Final = 8


def by_name(repository: Repository, name: str, root: bytes) -> SnapshotId:
    """Return the id for an id, an unambiguous prefix of one, ``latest``, ``latest~2``, or a time.

    The last three name snapshots of the training with this root alone.

    Raises:
        NotFound: There is no such snapshot, or there are several.
    """
    try:
        return repository.snapshots.resolve(name, root)
    except UsageError as error:
        raise NotFound(error.message, hint=error.hint) from None


def by_facts(repository: Repository, root: bytes, *, step: int | None, epoch: int | None) -> SnapshotId:
    """Return the id of the only snapshot with this step and epoch; None: any.

    Raises:
        NotFound: There is no such snapshot, or there are several.
    """
    saved = _readable(repository, root)
    found = [
        one
        for one in saved
        if (step is None or step == one.facts.step) and (epoch is None or epoch == one.facts.epoch)
    ]
    if len(found) == 1:
        return SnapshotId.parse(found[0].id)
    wanted = " and ".join(
        f"{name} {value}" for name, value in (("step", step), ("epoch", epoch)) if value is not None
    )
    if found:
        raise NotFound(
            f"{len(found)} snapshots have {wanted}: {_listed(found)}",
            hint="load one of them by its id, or give both step and epoch",
        )
    raise NotFound(f"no snapshot has {wanted}; there are {_listed(saved) or 'none'}")


def best_rule(rules: Iterable[Best], metric: str | None, mode: Mode | None) -> Best | None:
    """Return the rule that says which snapshot is best.

    Args:
        rules: Rules by which the manager keeps the best snapshots.
        metric: Metric that was asked for; None: that of the rules.
        mode: Mode that was asked for; None: that of the rule for the metric, else ``min``.

    Returns:
        The rule; None if neither the rules nor the caller name a metric.

    Raises:
        NotFound: The rules name several metrics.
        ValueError: There is a mode without a metric, or it is neither ``min`` nor ``max``.
    """
    known = list(dict.fromkeys((rule.metric, rule.mode) for rule in rules))
    if metric is None and mode is not None:
        raise ValueError(f"mode={mode!r} needs a metric: load_best('loss', {mode!r})")
    if mode is None:
        known = [one for one in known if metric in (None, one[0])]
        if len(known) > 1:
            names = ", ".join(f"Best(…, {name!r}, {one!r})" for name, one in known)
            raise NotFound(
                f"keep has several rules for the best: {names}", hint="give load_best metric and mode"
            )
        if known:
            return Best(1, *known[0])
    return None if metric is None else Best(1, metric, mode or "min")


def best(repository: Repository, root: bytes, rule: Best | None) -> SnapshotId:
    """Return the id of the best snapshot.

    Raises:
        NotFound: There is no rule, or no snapshot has a finite value of the metric.
    """
    saved = _readable(repository, root)
    names = sorted({name for one in saved for name in one.facts.metrics})
    metrics = f"there are {', '.join(map(one_line, names))}" if names else "there are none"
    if rule is None:
        raise NotFound(
            f"which metric is best is not known; of metrics {metrics}",
            hint="load_best('loss', 'min'), or SnapshotManager(…, keep=[Best(1, 'loss')])",
        )
    # In the order in which retention counts: of equally good ones the oldest.
    saved.sort(key=lambda one: (one.time_ns, one.id))
    candidates = [RetentionCandidate(one.id, one.time_ns, metrics=one.facts.metrics) for one in saved]
    found = best_of(rule, candidates)
    if not found:
        raise NotFound(
            f"no snapshot has a finite {one_line(rule.metric)}; of metrics {metrics}, "
            f"of snapshots {_listed(saved) or 'none'}"
        )
    return SnapshotId.parse(found[0].id)


def _readable(repository: Repository, root: bytes) -> list[SavedSnapshot]:
    """Return the snapshots of the training, newest first; log how many cannot be read."""
    saved = saved_snapshots(repository, root)
    unreadable = len(repository.snapshots.list(root=root)) - len(saved)
    if unreadable > 0:
        # Nobody can tell whether one of them is what was asked for.
        log.warning("ciuic: %s cannot be read, and is passed over", plural(unreadable, "snapshot"))
    return saved


def _listed(saved: Sequence[SavedSnapshot]) -> str:
    shown = [_in_words(one) for one in saved[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(saved) - _SHOWN} more" if len(saved) > _SHOWN else "")


def _in_words(one: SavedSnapshot) -> str:
    known = (("step", one.facts.step), ("epoch", one.facts.epoch))
    facts = ", ".join(f"{name} {value}" for name, value in known if value is not None)
    return f"{one.id} ({facts})" if facts else one.id

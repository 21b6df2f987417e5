"""``ciuic tensors``: the numbers in a checkpoint, by tensor, and over all snapshots."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import json_name, plural, shown, shown_text, warn
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import Cell, Column, Row, json_option, note, out_json, show_table
from ciuic.cli.shared.session import Session, current
from ciuic.cli.shared.timelines import PassedOver, timelines_with
from ciuic.errors import Damaged, NotFound, NotPermitted, Partial, UsageError

if TYPE_CHECKING:
    from ciuic.remote.reading.cache_directory import CacheDirectory
    from ciuic.training.tensor_history import TensorVersion

_TENSOR = Keys("name, dtype, shape, norm, nan, inf, drift, change_norm, largest_change, cosine")
_VERSION = Keys(
    "first, first_time, last, last_time (of the snapshots that have it), snapshots (their number), host, problem|null, left_out, norm,"
    " drift, nan, inf, most_changed, tensors",
    "each of the `versions` of `tensors`",
    tensors=_TENSOR,
)


@click.command("tensors", cls=FrameCommand)
@click.argument("path", metavar="FILE", type=SNAPSHOT_PATH)
@click.option(
    "-s",
    "--snapshot",
    "--at",
    "snapshot_id",
    metavar="ID",
    type=ID,
    help="Of this snapshot. Default: the newest.",
)
@click.option("--history", "over_time", is_flag=True, help="All versions of FILE, newest first, a line each.")
@click.option(
    "-n", "limit", type=click.IntRange(min=1), metavar="N", help="With --history: only the N newest."
)
@click.option(
    "-t",
    "--tensor",
    "pattern",
    default="*",
    metavar="PATTERN",
    help="Only tensors whose names match this shell pattern.",
)
@json_option
def command(
    path: bytes, snapshot_id: str | None, over_time: bool, limit: int | None, pattern: str, as_json: bool
) -> int:
    """Show the norm of each tensor in FILE, how far it moved since the version before, and NaN and infinities.

    FILE is a file of safetensors, torch or NumPy, a directory with such files, or what SnapshotManager saves. Nothing is unpickled. DRIFT is
    the norm of the change by the norm before. With --history all tensors together, in all snapshots: where the numbers went wrong.
    """
    session = current()
    if limit is not None and not over_time:
        raise click.UsageError("-n needs --history")
    if snapshot_id is not None and over_time:
        raise click.UsageError("--history shows all snapshots: not with -s")
    passed_over = PassedOver()
    with ExitStack() as closing:
        found = tensor_versions(session, path, snapshot_id, pattern, passed_over, _cache(closing))
        shown_versions = list(islice(found, limit if over_time else 1))
    code = passed_over.tell()
    if not shown_versions:
        raise NotFound(f"no snapshot has {shown(path)}", hint="ciuic find NAME searches for it elsewhere")
    if all(one.problem for one in shown_versions):
        kind = UsageError if all(one.is_other for one in shown_versions) else Damaged
        raise kind(shown_versions[0].problem)
    for reason in dict.fromkeys(reason for one in shown_versions for reason in one.left_out):
        warn(f"left out: {shown_text(reason)}")
    if not any(one.tensors for one in shown_versions):
        raise NotFound(f"no tensor of {shown(path)} matches {shown_text(pattern)}")
    if as_json:
        out_json({**json_name("path", path), "versions": [_document(one) for one in shown_versions]})
    elif over_time:
        _show_history(shown_versions)
    else:
        _show_tensors(shown_versions[0])
    if any(one.problem or one.left_out for one in shown_versions):
        return Partial.exit_code
    return code


def _cache(closing: ExitStack) -> CacheDirectory | None:
    from ciuic.remote.reading.cache_directory import cache_root, open_cache_at

    try:
        return closing.enter_context(open_cache_at(cache_root().parent / "tensors"))
    except NotPermitted as error:
        warn(f"no figures are kept: {error.message}", hint=error.hint)
        return None


def tensor_versions(
    session: Session,
    path: bytes,
    snapshot_id: str | None,
    pattern: str,
    passed_over: PassedOver,
    cache: CacheDirectory | None,
) -> Iterator[TensorVersion]:
    """Yield the versions, newest first; with a snapshot that one, compared with the version before."""
    from ciuic.history import Timeline
    from ciuic.training.tensor_history import tensor_history

    places = timelines_with(session, path, passed_over)
    wanted = None if snapshot_id is None else session.snapshots.resolve(snapshot_id)
    streams = []
    for repository, timeline in places.timelines:
        if wanted is not None:
            ids = [snapshot.id for snapshot in timeline.snapshots]
            if wanted not in ids:
                continue
            timeline = Timeline(timeline.host, timeline.path, timeline.snapshots[ids.index(wanted) :])
        streams.append(
            tensor_history(
                repository, timeline, places.path, pattern=pattern, cache=cache, on_damage=passed_over.add
            )
        )
    return _each_set_once(heapq.merge(*streams, key=lambda one: -one.version.last.order_ns))


def _each_set_once(found: Iterable[TensorVersion]) -> Iterator[TensorVersion]:
    """Yield the versions without those of further hosts of a set: each was read with all parts."""
    known = set()
    for one in found:
        place = one.version.last.set_member
        if place is None or place.id not in known:
            yield one
        if place is not None:
            known.add(place.id)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _count(number: int) -> Cell | str:
    return Cell(f"{number:,}", "red") if number else ""


def _show_history(found: list[TensorVersion]) -> None:
    several = len({one.version.host for one in found}) > 1
    columns = [
        Column("SINCE"),
        Column("SNAPSHOT"),
        Column("NORM", right=True),
        Column("DRIFT", right=True),
        Column("NAN", right=True),
        Column("INF", right=True),
        Column("MOST CHANGED", shrink=True),
        *([Column("HOST", shrink=True)] if several else []),
    ]
    rows: list[Row] = []
    for one in found:
        last = Cell(shown_text(one.problem), "yellow") if one.problem else shown_text(one.most_changed or "")
        numbers: list[Cell | str] = ["", "", "", ""]
        if not one.problem:
            numbers = [_text(one.norm), _text(one.drift), _count(one.nan), _count(one.inf)]
        host = [shown_text(one.version.host)] if several else []
        rows.append(
            (
                times.clock(one.version.first.time_ns),
                Cell(str(one.version.first.id), "bold"),
                *numbers,
                last,
                *host,
            )
        )
    show_table(columns, rows)


def _show_tensors(one: TensorVersion) -> None:
    columns = [
        Column("TENSOR", shrink=True),
        Column("DTYPE"),
        Column("SHAPE", right=True),
        Column("NORM", right=True),
        Column("DRIFT", right=True),
        Column("NAN", right=True),
        Column("INF", right=True),
    ]
    rows: list[Row] = [
        (
            shown_text(name),
            shown_text(figures.dtype),
            "x".join(map(str, figures.shape)) or "scalar",
            _text(figures.norm),
            _text(figures.drift) if one.has_earlier else "",
            _count(figures.nan),
            _count(figures.inf),
        )
        for name, figures in one.tensors.items()
    ]
    show_table(columns, rows)
    version = one.version
    since = (
        f", as since {times.clock(version.first.time_ns)} ({version.first.id})"
        if version.snapshots > 1
        else ""
    )
    note(f"{plural(len(rows), 'tensor')}, norm {_text(one.norm)}, in {version.last.id}{since}")


def _document(one: TensorVersion) -> dict[str, Any]:
    return _VERSION.of(
        one,
        one.version,
        first_time_ns=one.version.first.time_ns,
        last_time_ns=one.version.last.time_ns,
        norm=None if one.problem else one.norm,
        tensors=[_TENSOR.of(figures, name=name) for name, figures in one.tensors.items()],
    )

"""Verdicts, the newest checkpoint and the last good one in directories as trainers leave them, against what each save was meant to be."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, note, settings
from hypothesis import strategies as st
from support.cli_repository import CliRepository
from support.depth import by_depth
from support.trainer_directories import BESIDE, LATEST, NOT_FINITE, TRAINERS, run

from ciuic.history import StoredCheckpoint, checkpoints, judge_snapshot, last_good, timelines
from ciuic.repository import Repository
from ciuic.verdicts.records import newest_of
from ciuic.verdicts.verdict import FileVerdicts


@settings(max_examples=by_depth(60, 2000), deadline=None)
@given(st.data())
def test_verdicts_are_those_of_the_saves(data: st.DataObject) -> None:
    """A save that ended is GOOD under its name, one that was killed is not, and nothing beside them is newest or hides one."""
    trainer = data.draw(st.sampled_from(sorted(TRAINERS)))
    steps = data.draw(st.sampled_from([[9, 10, 11], [100, 200, 300], [100, 200], [8, 16]]))
    parts = len(TRAINERS[trainer](1).files)
    written = data.draw(st.one_of(st.just(-1), st.integers(1, parts)))
    cut = data.draw(st.sampled_from([1.0, 0.5, 0.0]))
    beside = tuple(data.draw(st.lists(st.sampled_from(sorted(BESIDE)), unique=True)))
    latest = data.draw(st.sampled_from(["", *sorted(LATEST)]))
    kwargs = {"latest": latest, "beside": beside, "within": data.draw(st.booleans())}
    before = run(trainer, steps[:-1], **kwargs)
    diverged = data.draw(st.booleans())
    now = run(trainer, steps, written=written, cut=cut, diverged=diverged, **kwargs)
    marked = diverged and any(content in NOT_FINITE for _, content in now.newest.files)
    note(f"{trainer} {steps} {now.newest.path} whole={now.is_whole} {marked=} {before.whole=}")
    with tempfile.TemporaryDirectory() as top:
        made = CliRepository(Path(top) / "repo", Path(top) / "root")
        first = made.snapshot(before.tree, mode="tracked")
        second = made.snapshot(now.tree, mode="tracked")
        with Repository.open(made.path) as repository:
            snapshots, _ = repository.snapshots.load_all()
            (timeline,) = timelines(snapshots)
            found = list(checkpoints(repository, timeline, snapshots[0]))
            for one in found:
                note(f"  {_relative(one, made)} {one.checkpoint.verdict} {one.checkpoint.files}")
            good = {_relative(one, made) for one in found if one.checkpoint.verdict.is_good}
            assert good == now.whole
            # The user's word for it: one checkpoint, with all below it.
            pattern = f"{made.root}/{now.newest.path}"
            named = {
                _relative(one, made): one.checkpoint.verdict
                for one in checkpoints(repository, timeline, patterns=[pattern])
            }
            if Path(now.newest.path).parts[0].encode() in now.tree and trainer != "hub":
                assert [path for path in named if path.startswith(now.newest.path)] == [now.newest.path]
                assert named[now.newest.path].is_good or not now.is_whole
            # A name that was not given yet is none that a trainer resumes from.
            if now.newest.path.endswith("-tmp-7"):
                return
            newest = newest_of(found)
            assert newest is not None
            assert _relative(newest, made).startswith(now.newest.path)
            chosen = last_good([(repository, timeline)], os.fsencode(made.root))
            assert chosen.snapshot.id == (second if now.is_whole else first)
            assert _relative(chosen.checkpoint, made) == (now if now.is_whole else before).newest.path
            assert all(now.newest.path in one.reason for one in chosen.passed_over)
            finite = last_good([(repository, timeline)], os.fsencode(made.root), finite=True)
            assert finite.snapshot.id == (first if marked else chosen.snapshot.id)
            counting = FileVerdicts(counted_bytes=1 << 30)
            for one in checkpoints(repository, timeline, snapshots[0], judge=counting.judge):
                if now.is_whole:
                    is_marked = marked and _relative(one, made) == now.newest.path
                    assert bool(one.checkpoint.verdict.not_finite) == is_marked
            for patterns in ([], [pattern]):
                judged = judge_snapshot(
                    repository, snapshots, snapshots[1], FileVerdicts(), patterns=patterns
                )
                carried, anew = (
                    judge_snapshot(repository, snapshots, snapshots[0], FileVerdicts(), beside, patterns)
                    for beside in ({judged.snapshot: judged}.get, lambda _: None)
                )
                assert carried.roots == anew.roots


def _relative(one: StoredCheckpoint, made: CliRepository) -> str:
    return os.path.relpath(os.fsdecode(one.checkpoint.path), made.root)

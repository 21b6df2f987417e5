"""The choice of the newest snapshot from which a training can go on, against a list kept beside it."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoint_files import FORMATS
from support.cli_repository import FIRST_NS, SECOND_NS, CliRepository

from ciuic.errors import NotFound
from ciuic.history import last_good, step_of, timelines
from ciuic.repository import Repository

WHOLE = FORMATS["safetensors"].make(random.Random(1))
OTHER = b"\x93\x17 numbers of a program" * 40

_CHECKPOINT = st.tuples(
    st.sampled_from(["a", "b"]), st.integers(0, 5), st.sampled_from(["whole", "torn", "other"])
)


# Two checkpoints of one time, of which the later by name is torn.
@example([[("a", 3, "whole"), ("b", 3, "torn")]], "")
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(_CHECKPOINT, max_size=4), min_size=1, max_size=6), st.sampled_from(["", "a", "b"]))
def test_choice_is_the_newest_with_a_good_newest_checkpoint(
    history: list[list[tuple[str, int, str]]], below: str
) -> None:
    """In random histories the chosen snapshot and those passed over are the ones that the rule names."""
    with tempfile.TemporaryDirectory() as top:
        made = CliRepository(Path(top) / "repo", Path(top) / "root")
        wanted: str | None = None
        goods: list[tuple[int, str]] = []
        for checkpoints in history:
            tree: dict[bytes, Any] = {b"a": {b"log": b"x"}, b"b": {}}
            newest: tuple[int, str, bool] | None = None
            whole: list[int] = []
            for directory, step, kind in checkpoints:
                content = {"whole": WHOLE, "torn": WHOLE[:-1], "other": OTHER}[kind]
                # Of a time, the last by name; what is of no known format stands aside.
                name = f"cache-{step}.bin" if kind == "other" else f"step-{step}.safetensors"
                tree[directory.encode()][name.encode()] = content, {"mtime_ns": FIRST_NS + step * SECOND_NS}
            for directory, files in tree.items():
                for name, what in files.items():
                    if isinstance(what, tuple) and what[0] != OTHER and directory.decode().startswith(below):
                        own = step_of(name) or 0, directory.decode(), what[0] == WHOLE
                        newest = max(newest or own, own)
                        whole += [own[0]] if own[2] else []
            id_ = made.snapshot(tree, mode="tracked")
            if newest is not None and newest[2]:
                wanted = str(id_)
            goods += [(step, str(id_)) for step in whole]
        with Repository.open(made.path) as repository:
            snapshots, _ = repository.snapshots.load_all()
            path = os.path.join(os.fsencode(made.root), below.encode()).rstrip(b"/")
            places = [(repository, timeline) for timeline in timelines(snapshots)]
            if wanted is None and not goods:
                with pytest.raises(NotFound, match="no snapshot has a GOOD checkpoint"):
                    last_good(places, path)
                return
            found = last_good(places, path)
            if wanted is None:
                # The newest GOOD one of all, in the newest snapshot that has it.
                assert step_of(found.checkpoint.checkpoint.path) == max(step for step, _ in goods)
                assert str(found.snapshot.id) == max(goods)[1]
                assert all(one.mtime_ns >= found.checkpoint.mtime_ns for one in found.not_good)
                assert found.not_good
                return
            assert all(one.checkpoint.path.endswith(b".bin") for one in found.not_good)
            assert str(found.snapshot.id) == wanted
            newer = [one.id for one in snapshots[: [one.id for one in snapshots].index(found.snapshot.id)]]
            assert [one.snapshot.id for one in found.passed_over] == newer


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (b"/x/epoch=3-step=1200.ckpt", 1200),
        (b"/x/checkpoint-500", 500),
        (b"/x/global_step20", 20),
        (b"/x/model-00001-of-00002.safetensors", None),
        (b"/x/last.ckpt", None),
        (b"/9/step_000100_v2.pt", 100),
    ],
)
def test_step_of_a_name(name: bytes, step: int | None) -> None:
    """The number behind "step" counts, or the only one; names with several numbers do not tell."""
    assert step_of(name) == step

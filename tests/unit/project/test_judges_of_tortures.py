"""Tests that the judges of the cut and resumes tortures accept what may be, and find and name what may not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.resumes.child import digest
from support.resumes.judge import Comparison, compare, compare_lives
from torture import cut_judge as judge
from torture.cut_judge import LAP, PAGE, SLOTS, NameHistory, Range, View

SEED = 4
APPENDED = b"".join(judge.appended(SEED, number) for number in range(300))


def _end(count: int) -> int:
    return sum(len(judge.appended(SEED, number)) for number in range(count))


def _appends(content: bytes, at: Range, *, synced: bool = False) -> bool:
    return not judge.judge_appends({b"lap0": content}, SEED, at, synced=synced).wrong


@pytest.mark.parametrize("synced", [False, True])
def test_appends_up_to_any_moment_between_are_accepted(synced: bool) -> None:
    """The records up to n, for low ≤ n ≤ high, are accepted; fewer and more are not."""
    at = Range(100, 200)
    assert all(_appends(APPENDED[: _end(n)], at, synced=synced) for n in (100, 101, 150, 200))
    assert not any(_appends(APPENDED[: _end(n)], at, synced=synced) for n in (0, 99, 201, 300))


def test_a_page_that_has_not_arrived_is_accepted_only_where_nothing_was_promised() -> None:
    """A hole after what was written before the snapshot is accepted, and one in it or in synced records not.

    The former is what the write cache may hold back.
    """
    page = _end(100) // PAGE + 1
    content = bytearray(APPENDED[: _end(200)])
    content[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    assert _appends(bytes(content), Range(100, 200))
    assert not _appends(bytes(content), Range(100, 200), synced=True)
    assert not _appends(bytes(content), Range(200, 200))


def test_foreign_bytes_are_found_where_nothing_was_promised() -> None:
    """Bytes that were never written are found, also where nothing was promised."""
    content = bytearray(APPENDED[: _end(200)])
    content[_end(150)] ^= 1
    assert not _appends(bytes(content), Range(100, 200))


def test_a_lap_that_is_missing_is_found_unless_it_was_being_removed() -> None:
    """A missing lap is found, except the one that is unlinked when the next lap begins."""
    assert judge.judge_appends({}, SEED, Range(10, 20), synced=False).wrong
    assert not judge.judge_appends({}, SEED, Range(0, 20), synced=False).wrong
    last = {b"lap2": b"", b"lap1": b"".join(judge.appended(SEED, LAP + n) for n in range(LAP))}
    assert not judge.judge_appends(last, SEED, Range(2 * LAP, 2 * LAP + 1), synced=False).wrong
    assert judge.judge_appends(last, SEED, Range(2 * LAP - 1, 2 * LAP - 1), synced=False).wrong


def _slots(numbers: list[int]) -> bytes:
    return b"".join(
        judge.slot_record(SEED, next(n for n in numbers if n % SLOTS == slot)) for slot in range(SLOTS)
    )


def test_overwritten_slots() -> None:
    """Each slot has its newest record before the cut or a later one, 32 in a row, and none is torn."""
    exact = _slots(list(range(40, 72)))
    assert not judge.judge_slots(exact, SEED, Range(40, 40), in_order=True).wrong
    assert judge.judge_slots(exact, SEED, Range(41, 50), in_order=False).wrong
    assert judge.judge_slots(exact, SEED, Range(30, 39), in_order=False).wrong
    # Record 103 came before 71 to 102.
    skipped = _slots([*range(40, 71), 103])
    assert not judge.judge_slots(skipped, SEED, Range(20, 80), in_order=False).wrong
    assert judge.judge_slots(skipped, SEED, Range(20, 80), in_order=True).wrong
    torn = exact[:2000] + _slots(list(range(72, 104)))[2000:PAGE] + exact[PAGE:]
    assert judge.judge_slots(torn, SEED, Range(40, 80), in_order=False).wrong
    assert judge.judge_slots(exact[:-1], SEED, Range(40, 40), in_order=False).wrong


def _words(numbers: list[int]) -> bytes:
    words = [judge.word(next(n for n in numbers if n % SLOTS == slot)) for slot in range(SLOTS)]
    return b"".join(word.to_bytes(8, "little").ljust(PAGE, b"\0") for word in words)


def test_mapped_words() -> None:
    """Stores since the last msync may arrive in any order, but not before older ones, and only as stored."""
    assert not judge.judge_words(_words(list(range(40, 72))), Range(40, 40), every=16).wrong
    assert judge.judge_words(_words(list(range(40, 72))), Range(41, 50), every=16).wrong
    # 96 is there, 64 to 95 are not.
    late = [*range(33, 64), 32 + 64]
    assert judge.judge_words(_words(late), Range(0, 90), every=16).wrong
    bad = bytearray(_words(list(range(40, 72))))
    bad[1] ^= 4
    assert judge.judge_words(bytes(bad), Range(40, 40), every=16).wrong


def _strips(counts: list[int]) -> list[View]:
    views: list[dict[bytes, Any]] = [{}, {}]
    for strip, count in enumerate(counts):
        views[strip % 2][b"s-%d" % strip] = b"".join(judge.sequence_line(n) for n in range(count))
    return views


def test_the_order_that_fsync_established_holds_across_both_roots() -> None:
    """A line in a later file without the synced one before it, in whichever root, is no valid moment."""
    assert not judge.judge_sequence(_strips([6, 6, 5, 5]), b"s", Range(22, 22)).wrong
    assert judge.judge_sequence(_strips([6, 5, 6, 5]), b"s", Range(22, 22)).wrong
    assert judge.judge_sequence(_strips([6, 6, 5, 5]), b"s", Range(23, 30)).wrong
    assert judge.judge_sequence(_strips([6, 6, 5, 5]), b"s", Range(10, 21)).wrong


def _carry_out(tops: tuple[Path, Path], steps: int) -> None:
    """Carry out the steps of a history on plain directories."""
    for top in tops:
        (top / "a/c").mkdir(parents=True)
        (top / "b").mkdir()
    history = NameHistory(SEED)
    for _ in range(steps):
        step = history.next()
        path, to = (os.path.join(os.fsencode(tops[step.root]), name) for name in (step.path, step.to))
        if step.do in ("create", "fill"):
            with open(path, "wb") as file:
                file.write(judge.filling(step.token) if step.do == "fill" else b"")
        elif step.do == "rename":
            os.rename(path, to)
        else:
            {"unlink": os.unlink, "mkdir": os.mkdir, "rmdir": os.rmdir}[step.do](path)


def _read(top: Path) -> dict[bytes, Any]:
    return {
        os.fsencode(entry.name): _read(entry) if entry.is_dir() else entry.read_bytes()
        for entry in top.iterdir()
    }


def test_names_agree_with_real_directories_and_one_step_of_one_root_too_many_is_found(tmp_path: Path) -> None:
    """The state after n steps is accepted for exactly the moments that include n, at one instant only."""
    sets = []
    for steps in (400, 440):
        tops = (tmp_path / f"{steps}-0", tmp_path / f"{steps}-1")
        _carry_out(tops, steps)
        sets.append([_read(top) for top in tops])
    early, late = sets
    assert not judge.judge_names(early, NameHistory(SEED), Range(390, 410)).wrong
    assert judge.judge_names(early, NameHistory(SEED), Range(420, 450)).wrong
    assert judge.judge_names([early[0], late[1]], NameHistory(SEED), Range(390, 450)).wrong


def test_a_checkpoint_that_is_being_saved() -> None:
    """A partly saved checkpoint is accepted when marked; gaps, foreign pages and a wrong mark are found."""
    pages = [judge.slot_record(7, number) for number in range(judge.FRESH_LAP)]
    at = Range(10, 14)

    def is_rejected(content: bytes, marked: set[bytes], *, at: Range = at) -> bool:
        return bool(judge.judge_fresh({b"lap0": content}, marked, 7, at).wrong)

    assert not is_rejected(b"".join(pages[:10]), {b"lap0"})
    assert not is_rejected(b"".join(pages[:14]), {b"lap0"})
    assert is_rejected(b"".join(pages[:15]), {b"lap0"})
    assert is_rejected(b"".join(pages[:14]), set())
    assert is_rejected(b"".join(pages[:9]), {b"lap0"})
    assert is_rejected(b"".join(pages[:10])[:-1], {b"lap0"})
    assert is_rejected(b"".join(pages[:5]) + bytes(judge.PAGE) + b"".join(pages[6:12]), {b"lap0"})
    closed = Range(judge.FRESH_LAP + 1, judge.FRESH_LAP + 2)
    complete = {b"lap0": b"".join(pages), b"lap1": judge.slot_record(7, judge.FRESH_LAP)}
    assert not judge.judge_fresh(complete, {b"lap1"}, 7, closed).wrong
    assert judge.judge_fresh(complete, {b"lap0", b"lap1"}, 7, closed).wrong
    assert judge.judge_fresh({b"lap1": complete[b"lap1"]}, {b"lap1"}, 7, closed).wrong


LINES = [("step 1", {"loss": 1.5}), ("step 2", {"loss": 1.25, "rate": 0.1}), ("epoch 0", {"loss": 1.375})]
RESULT = {"state": {"model": "a", "average": "b"}, "values": {"history": [1.5, 1.25], "seconds": 3.0}}


def _run(where: Path, lines: list[tuple[str, dict[str, Any]]], result: dict[str, Any]) -> Path:
    where.mkdir()
    (where / "log-0").write_text(
        "".join(json.dumps({"key": key, "values": values}) + "\n" for key, values in lines)
    )
    (where / "result-0").write_text(json.dumps(result))
    return where


@pytest.mark.parametrize(
    ("lines", "result", "expected"),
    [
        ([LINES[0], *LINES], RESULT, Comparison((), (), ())),
        (LINES[1:], RESULT, Comparison((), ("step: a line is missing",), ())),
        (
            [*LINES, ("step 3", {})],
            RESULT,
            Comparison((), ("step: a line that the undisturbed run has not",), ()),
        ),
        # One wrong line is found, even if the same step was reported rightly in another life.
        ([*LINES, ("step 1", {"loss": 1.4})], RESULT, Comparison((), ("step: loss",), ())),
        ([*LINES, ("step 2", {"loss": 1.25})], RESULT, Comparison((), ("step: rate",), ())),
        (LINES, {**RESULT, "state": {"model": "a", "average": "c"}}, Comparison(("average",), (), ())),
        (
            LINES,
            {**RESULT, "values": {"history": [1.25], "seconds": 2.0}},
            Comparison((), ("at the end: history",), ("at the end: seconds",)),
        ),
    ],
)
def test_each_difference_is_named(
    lines: list[tuple[str, dict[str, Any]]], result: dict[str, Any], expected: Comparison, tmp_path: Path
) -> None:
    """A part of the state, a value at the end, and a value of any line that was ever reported."""
    undisturbed, killed = _run(tmp_path / "a", LINES, RESULT), _run(tmp_path / "b", lines, result)
    assert compare(undisturbed, killed, 1, {"at the end: seconds": "a time"}) == expected


def test_a_state_is_compared_with_the_one_that_was_saved(tmp_path: Path) -> None:
    """A resume from a state that differs, or that no life has saved, is named; so is a run without any resume."""
    saved = ("state a 4", {"model": 1, "rate": 2})
    for number, (lines, expected) in enumerate(
        [
            ([saved, ("resumed a 4", {"model": 1, "rate": 2})], Comparison((), (), ())),
            ([saved, ("resumed a 4", {"model": 1, "rate": 3})], Comparison(("rate",), (), ())),
            ([saved, ("resumed b 4", {"model": 1})], Comparison(("model",), (), ())),
            ([saved], Comparison((), ("no life has resumed",), ())),
        ]
    ):
        assert compare_lives(_run(tmp_path / str(number), lines, RESULT)) == expected


def test_a_digest_depends_on_every_value_and_type() -> None:
    """Values that compare equal have different digests if their types differ."""
    different = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": [1]}, {"a": [1, []]}, {"b": 1}, {"a": None}, {}]
    assert len({digest(value) for value in different}) == len(different)

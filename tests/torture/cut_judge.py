"""Histories of the cut torture's writers, and the check that a snapshot shows one moment of each.

Everything a writer does follows from its seed, so its history needs no log: operation k is known from k. A
snapshot was requested when at least ``low`` operations had returned, and its cut was over when at most
``high`` had begun. What it must show depends on the writer (docs/decisions/flush-before-the-cut.md):

* data that the kernel may cache: everything up to ``low``, exactly; later operations may be there in any
  order, page by page, each page as it was at some moment, never anything else;
* data of a new file that is still open (a checkpoint being saved), which the kernel may carry past the
  overlay: everything up to ``low``, then a beginning of what was begun until the cut; marked as open for
  writing. Once closed, all of it and no mark;
* data synced or written directly, and operations on names: the state after exactly n operations,
  low ≤ n ≤ high.

Each judge returns how many records it compared, and a sentence for each impossible state.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import deque
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

PAGE = 4096
LAP = 4000
"""Appended records of one file; the next lap has the next file, and the file before the last is removed."""
FRESH_LAP = 1000
"""Pages of one file of the checkpoint writer."""
SLOTS = 32
STRIPS = 4
"""Files that the global writer appends to, in this order, alternating between the roots."""
View = Mapping[bytes, Any]
"""Directory of a snapshot: name → content, or another View."""


class Range(NamedTuple):
    """Operations that had returned before the request of the snapshot, and those begun at its cut."""

    low: int
    high: int


class Verdict(NamedTuple):
    """Records compared, and the errors found."""

    records: int
    wrong: tuple[str, ...] = ()


@lru_cache(maxsize=100_000)
def appended(seed: int, number: int) -> bytes:
    """Return record ``number`` (from 0) of an appending writer: a line that carries its number."""
    rng = random.Random(seed * 1_000_003 + number)
    text = b"%d:%s:" % (number, rng.randbytes(rng.randrange(15, 90)).hex().encode())
    return text + b"%08x\n" % zlib.crc32(text)


def slot_record(seed: int, number: int) -> bytes:
    """Return a page filled from its number, as the overwriting writers store it."""
    return (b"%d:%d:" % (seed, number)).ljust(64, b".") + random.Random(seed ^ number << 8).randbytes(
        PAGE - 64
    )


def word(number: int) -> int:
    """Return the 8 bytes that a mapping writer stores: the number and its checksum."""
    return number << 24 | zlib.crc32(number.to_bytes(8, "little")) & 0xFFFFFF


def word_number(value: int) -> int | None:
    """Return the number in such a word, or None if it is no such word."""
    return value >> 24 if word(value >> 24) == value else None


def sequence_line(number: int) -> bytes:
    return b"%011d\n" % number


# -- judges


def judge_appends(view: View, seed: int, at: Range, *, synced: bool) -> Verdict:
    """Judge an appending writer; ``view`` is its directory, with a file for each lap."""
    wrong: list[str] = []
    records = 0
    last_lap = at.high // LAP
    for lap in range(max(0, at.low // LAP - 1), last_lap + 1):
        name = b"lap%d" % lap
        inside = Range(_clamp(at.low - lap * LAP), _clamp(at.high - lap * LAP))
        if name in view:
            wrong += [
                f"{name.decode()}: {text}" for text in _judge_lap(view[name], seed, lap, inside, synced)
            ]
            records += inside.low
        elif inside.low > 0 and lap + 2 > last_lap:
            wrong.append(f"{name.decode()} is missing; {inside.low} of its records were written")
    return Verdict(records, tuple(wrong))


def judge_fresh(view: View, marked: Set[bytes], seed: int, at: Range) -> Verdict:
    """Judge a checkpoint writer; ``view`` is its directory, ``marked`` its names open for writing."""
    wrong: list[str] = []
    records = 0
    for lap in range(max(0, at.low // FRESH_LAP - 1), at.high // FRESH_LAP + 1):
        name = b"lap%d" % lap
        first, end = lap * FRESH_LAP, (lap + 1) * FRESH_LAP
        content = view.get(name)
        if content is None:
            if at.low > first and at.high <= end + FRESH_LAP:
                wrong.append(f"{name.decode()} is missing; {at.low - first} of its pages were written")
            continue
        pages = len(content) // PAGE
        expected = b"".join(
            slot_record(seed, number) for number in range(first, first + min(pages, FRESH_LAP))
        )
        if content != expected:
            wrong.append(
                f"{name.decode()}: its {len(content)} bytes are not the pages {first} to {first + pages}"
            )
        if pages < min(at.low, end) - first:
            wrong.append(f"{name.decode()} has {pages} pages; {min(at.low, end) - first} were written")
        if pages > at.high - first:
            wrong.append(f"{name.decode()} has {pages} pages; {at.high - first} had been begun")
        if at.low > first and at.high <= end and name not in marked:
            wrong.append(f"{name.decode()} was being written, and is not marked")
        if at.low > end and name in marked:
            wrong.append(f"{name.decode()} was closed, and is marked")
        records += pages
    return Verdict(records, tuple(wrong))


def _clamp(number: int) -> int:
    return min(max(number, 0), LAP)


def _judge_lap(content: bytes, seed: int, lap: int, at: Range, synced: bool) -> list[str]:
    ends = [0]
    expected = bytearray()
    for number in range(at.high):
        expected += appended(seed, lap * LAP + number)
        ends.append(len(expected))
    if len(content) > len(expected):
        return [f"it has {len(content)} bytes; {len(expected)} were ever written"]
    if content[: ends[at.low]] != expected[: ends[at.low]]:
        return [f"the {at.low} records written before the snapshot was asked for are not all there"]
    if at_page := _not_of_history(content, bytes(expected)):
        return [f"the page at {at_page - 1} holds what was never written there"]
    if not synced:
        return []
    complete = next((n for n in range(at.high, -1, -1) if content[: ends[n]] == expected[: ends[n]]), 0)
    if len(content) > ends[min(complete + 1, at.high)]:
        return [f"record {complete} is not whole, and a later one is there: each was synced before the next"]
    return []


def _not_of_history(content: bytes, expected: bytes) -> int:
    """Return 0, or 1 + the offset of a page that is no beginning of the written data followed by zeros."""
    for offset in range(0, len(content), PAGE):
        page, wanted = content[offset : offset + PAGE], expected[offset : offset + PAGE]
        if page != wanted[: len(page)]:
            filled = len(page.rstrip(b"\0"))
            if page[:filled] != wanted[:filled]:
                return offset + 1
    return 0


def judge_slots(content: bytes | None, seed: int, at: Range, *, in_order: bool) -> Verdict:
    """Judge a file of SLOTS pages; operation k wrote page k % SLOTS.

    ``in_order``: each arrived before the next.
    """
    if content is None or len(content) != SLOTS * PAGE:
        return Verdict(0, (f"the file has {len(content or b'')} bytes instead of {SLOTS * PAGE}",))
    numbers: list[int] = []
    for slot in range(SLOTS):
        page = content[slot * PAGE : (slot + 1) * PAGE]
        head = page[:64].rstrip(b".").split(b":")
        number = int(head[1]) if len(head) == 3 and head[1].isdigit() else -1
        if number < 0 or number % SLOTS != slot or page != slot_record(seed, number):
            return Verdict(slot, (f"slot {slot} holds no whole record: {page[:64]!r}",))
        numbers.append(number)
    return _judge_numbers(numbers, at, in_order)


def judge_words(content: bytes | None, at: Range, *, every: int) -> Verdict:
    """Judge a mapped file: word k is in page k % SLOTS, and each ``every`` operations were synced."""
    if content is None or len(content) != SLOTS * PAGE:
        return Verdict(0, (f"the file has {len(content or b'')} bytes instead of {SLOTS * PAGE}",))
    numbers: list[int] = []
    for slot in range(SLOTS):
        value = int.from_bytes(content[slot * PAGE : slot * PAGE + 8], "little")
        number = word_number(value)
        if number is None or number % SLOTS != slot:
            return Verdict(slot, (f"page {slot} holds a word that was never stored: {value:#x}",))
        numbers.append(number)
    verdict = _judge_numbers(numbers, at, in_order=False)
    synced = max(numbers) // every * every
    late = [n for n in numbers if n + SLOTS < synced]
    if late and not verdict.wrong:
        return Verdict(
            SLOTS, (f"store {max(numbers)} is there, but {late[0] + SLOTS}, synced before it, is not",)
        )
    return verdict


def _judge_numbers(numbers: Sequence[int], at: Range, in_order: bool) -> Verdict:
    """Judge that slot i holds a number n with n % SLOTS == i.

    Number k is operation k - SLOTS + 1: the first SLOTS were there from the start.
    """
    # Numbers below these had been written, and had been begun.
    low, high = at.low + SLOTS, at.high + SLOTS
    wrong = []
    for slot, number in enumerate(numbers):
        newest = (low - 1 - slot) // SLOTS * SLOTS + slot
        if number < newest:
            wrong.append(
                f"slot {slot} has record {number}; {newest} was written before the snapshot was asked for"
            )
        if number >= high:
            wrong.append(f"slot {slot} has record {number}, which was begun after the cut (at {high})")
    if in_order and max(numbers) - min(numbers) != SLOTS - 1:
        wrong.append(f"records {min(numbers)} to {max(numbers)} are there, which is no moment of its history")
    return Verdict(len(numbers), tuple(wrong))


def judge_sequence(views: Sequence[View], name: bytes, at: Range) -> Verdict:
    """Judge the global writer: step k appended line k // STRIPS to file k % STRIPS, then synced."""
    wrong: list[str] = []
    counts = []
    for strip in range(STRIPS):
        content = views[strip % 2].get(name + b"-%d" % strip, b"")
        count = len(content) // 12
        if content != b"".join(sequence_line(n) for n in range(count)):
            wrong.append(f"file {strip} is not the lines 0 to {count - 1} in order")
        counts.append(count)
    steps = sum(counts)
    if counts != [(steps + STRIPS - 1 - strip) // STRIPS for strip in range(STRIPS)]:
        wrong.append(f"lines in the {STRIPS} files: {counts}; each was synced before the next was written")
    if not at.low <= steps <= at.high:
        wrong.append(f"{steps} lines; {at.low} had been synced, {at.high} had been begun")
    return Verdict(steps, tuple(wrong))


# -- names

Files = dict[tuple[int, bytes], Any]
"""Map from (root, path) to a token of the content, None while it may be anything, or the string "dir"."""


class Step(NamedTuple):
    """Operation on names: kind, root and operands."""

    # One of create, fill, rename, unlink, mkdir, rmdir.
    do: str
    root: int
    path: bytes
    to: bytes = b""
    token: int = 0


def filling(token: int) -> bytes:
    """Return the content of a checkpoint."""
    rng = random.Random(token)
    return rng.randbytes(rng.choice([0, 100, 5000, 70_000, 300_000]))


class NameHistory:
    """Endless sequence of a name writer's steps, and the state after each. Steps must be taken in order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._planned: list[Step] = []
        self._token = seed << 32
        self.taken = 0
        self.recent: deque[tuple[int, Step]] = deque(maxlen=1000)
        self.state: Files = {}
        for root in (0, 1):
            for name in (b"a", b"b", b"a/c"):
                self.state[root, name] = "dir"

    def next(self) -> Step:
        """Decide the next step; ``state`` is as after it."""
        while not self._planned:
            self._plan()
        step = self._planned.pop(0)
        _apply(self.state, step)
        self.taken += 1
        self.recent.append((self.taken, step))
        return step

    def _plan(self) -> None:
        rng = self._rng
        root = rng.randrange(2)
        folders = [path for at, path in self.state if at == root and self.state[at, path] == "dir"]
        files = [path for at, path in self.state if at == root and self.state[at, path] != "dir"]
        what = rng.random()
        # A checkpoint in both roots, as training loops write it.
        if (what < 0.4 and len(files) < 30) or len(files) < 4:
            self._token += 1
            name = rng.choice(folders) + b"/k%d" % rng.randrange(6)
            self._planned += [
                Step("create", root, name + b".tmp", token=self._token),
                Step("fill", root, name + b".tmp", token=self._token),
                Step("rename", root, name + b".tmp", name),
            ]
        elif what < 0.55:
            self._planned.append(Step("unlink", root, rng.choice(files)))
        elif what < 0.7:
            to = rng.choice(folders) + b"/" + rng.choice(files).rpartition(b"/")[2]
            source = rng.choice(files)
            if source != to:
                self._planned.append(Step("rename", root, source, to))
        else:
            self._plan_folders(root, folders)

    def _plan_folders(self, root: int, folders: list[bytes]) -> None:
        rng = self._rng
        name = rng.choice(folders) + b"/d%d" % rng.randrange(4)
        source = rng.choice(folders)
        empty = [f for f in folders if not any(p.startswith(f + b"/") for r, p in self.state if r == root)]
        if (root, name) not in self.state and name.count(b"/") < 12 and len(folders) < 20:
            if rng.random() < 0.6 and b"/" in source and not (name + b"/").startswith(source + b"/"):
                self._planned.append(Step("rename", root, source, name))
            else:
                self._planned.append(Step("mkdir", root, name))
        elif empty and rng.random() < 0.5 and b"/" in empty[0]:
            self._planned.append(Step("rmdir", root, empty[0]))


def _apply(state: Files, step: Step) -> None:
    here = (step.root, step.path)
    if step.do == "create":
        state[here] = None
    elif step.do == "fill":
        state[here] = step.token
    elif step.do == "mkdir":
        state[here] = "dir"
    elif step.do in ("unlink", "rmdir"):
        del state[here]
    else:
        below = step.path + b"/"
        moved = [path for root, path in state if root == step.root and (path + b"/").startswith(below)]
        contents = [state.pop((step.root, path)) for path in moved]
        for path, content in zip(moved, contents, strict=True):
            state[step.root, step.to + path[len(step.path) :]] = content


def judge_names(views: Sequence[View], passed: NameHistory, at: Range) -> Verdict:
    """Judge that the snapshot is the state after exactly n steps; both roots are cut at one instant.

    ``passed`` is moved on to ``low``: snapshots are judged in the order of their requests.
    """
    found = {(root, path): content for root in (0, 1) for path, content in _flat(views[root])}
    while passed.taken < at.low:
        passed.next()
    history = copy.deepcopy(passed)
    nearest: list[str] | None = None
    while True:
        differences = _differences(history.state, found)
        if not differences:
            return Verdict(len(found))
        if nearest is None or len(differences) < len(nearest):
            lately = [
                f"{number} {step}" for number, step in history.recent if _concerns(step, differences[0].path)
            ]
            nearest = [f"after step {history.taken}", *(d.text for d in differences[:5]), *lately[-8:]]
        if history.taken >= at.high:
            break
        history.next()
    return Verdict(
        len(found), (f"no moment between {at.low} and {at.high} steps is like it: {'; '.join(nearest)}",)
    )


class Difference(NamedTuple):
    """Name that differs from the state after a step."""

    path: bytes
    text: str


def _concerns(step: Step, path: bytes) -> bool:
    """Return whether the step changed the path or a directory above it."""
    return any(path == name or path.startswith(name + b"/") for name in (step.path, step.to) if name)


def _differences(wanted: Files, found: Mapping[tuple[int, bytes], Any]) -> list[Difference]:
    differences = [Difference(key[1], f"{key} should be there") for key in wanted if key not in found]
    differences += [Difference(key[1], f"{key} should not be there") for key in found if key not in wanted]
    for key in wanted.keys() & found.keys():
        token, content = wanted[key], found[key]
        if (token == "dir") != (content is None):
            differences.append(Difference(key[1], f"{key} is of another type"))
        elif isinstance(token, int) and content != filling(token):
            differences.append(
                Difference(key[1], f"{key} is not the content that was synced before it got its name")
            )
    return differences


def _flat(view: View, prefix: bytes = b"") -> list[tuple[bytes, bytes | None]]:
    found: list[tuple[bytes, bytes | None]] = []
    for name, content in view.items():
        if isinstance(content, bytes):
            found.append((prefix + name, content))
        else:
            found.append((prefix + name, None))
            found += _flat(content, prefix + name + b"/")
    return found

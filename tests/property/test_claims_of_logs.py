"""What logs may give up in a day, compared with a model: random commits and claims, retention, and what is forged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.remote_world import Bucket, Ids, sealer

from ciuic.remote.claims import FREE, INTERVAL_NS, Claim, ClaimOfLog, Commit, waiting_claims
from ciuic.remote.documents import (
    LiveManifest,
    LogCommit,
    LogEntry,
    LogHello,
    LogRemove,
    LogState,
    StoredApproval,
    create_approval,
    create_entry,
)
from ciuic.remote.log_reader import LogReader, LogSummary
from ciuic.remote.object_names import manifest_name

HOUR_NS = 3600 * 10**9
REPOSITORIES = ("a" * 32, "b" * 32)
SEALS = sealer(Ids("claims"))

Told = tuple[dict[str, Commit], list[ClaimOfLog]]


@st.composite
def told(draw: st.DrawFn) -> Told:
    """Draw commits, some of one snapshot, and claims of several logs."""
    hours = st.integers(1, 24 * 5)
    commits = {
        f"m{number}": Commit(
            draw(st.sampled_from(REPOSITORIES)), f"s{draw(st.integers(0, 60))}", hour * HOUR_NS
        )
        for number, hour in enumerate(draw(st.lists(hours, max_size=40)))
    }
    claims = [
        ClaimOfLog(
            manifest, draw(st.sampled_from("wx")), Claim(number, draw(hours) * HOUR_NS, draw(st.booleans()))
        )
        for number, manifest in enumerate(
            draw(st.lists(st.sampled_from([*commits, "unknown"]), max_size=60, unique=True))
        )
    ]
    return commits, claims


def counts(commits: dict[str, Commit], gone: dict[str, int], repository: str) -> list[tuple[int, int]]:
    """Return times, and the snapshots that there are from then on."""
    times = sorted({*(one.time_ns for one in commits.values()), *gone.values()})
    return [
        (
            now,
            len(
                {
                    one.snapshot
                    for name, one in commits.items()
                    if one.repository == repository and one.time_ns <= now and gone.get(name, now + 1) > now
                }
            ),
        )
        for now in times
    ]


@given(told())
@settings(max_examples=200)
def test_the_number_of_snapshots_falls_slowly(told: Told) -> None:
    """In no day the number of a repository's snapshots falls by more than half of the most, or a few; the rest of the claims wait."""
    commits, claims = told
    waiting = waiting_claims(commits, claims)
    claimed = {one.manifest for one in claims if one.manifest in commits}
    assert waiting.keys() <= claimed
    assert all(one in claims for one in waiting.values())
    gone = {
        one.manifest: max(one.claim.time_ns, commits[one.manifest].time_ns)
        for one in claims
        if one.manifest in claimed - waiting.keys()
    }
    for repository in REPOSITORIES:
        numbers = counts(commits, gone, repository)
        for (now, number), before in zip(numbers, range(len(numbers)), strict=True):
            most = max([count for time, count in numbers[:before] if time >= now - INTERVAL_NS], default=0)
            assert number >= most - max(FREE, most // 2)


@given(
    st.lists(st.integers(1, 24 * 60), min_size=1, max_size=80),
    st.integers(1, 40),
    st.integers(0, 10),
)
def test_retention_waits_for_nobody(minutes: list[int], keep: int, after: int) -> None:
    """A host that keeps so many of the newest, whatever its pace and its pauses, has no claim that waits."""
    commits: dict[str, Commit] = {}
    claims: list[ClaimOfLog] = []
    kept: list[str] = []
    now_ns = HOUR_NS
    for number, minute in enumerate(minutes):
        now_ns += minute * 60 * 10**9
        name = f"m{number:03}"
        commits[name] = Commit(REPOSITORIES[0], name, now_ns)
        kept.append(name)
        while len(kept) > keep:
            claims.append(ClaimOfLog(kept.pop(0), "w", Claim(number, now_ns + after)))
    assert waiting_claims(commits, claims) == {}


@given(
    st.lists(st.sampled_from([10, 60, 60 * 7, 60 * 24 * 3]), min_size=20, max_size=120),
    st.integers(1, 12),
    st.integers(1, 30),
    st.integers(0, 90),
)
@settings(max_examples=60)
def test_ageing_waits_for_nobody(minutes: list[int], keep_last: int, days: int, pause: int) -> None:
    """A host that keeps so many days gives up what goes without a person, whatever its pace and its pauses, and the rest another day."""
    reader, log = LogReader(Bucket(lambda: 0), SEALS), LogSummary()
    reader.logs = {"w": log}
    now_ns, number, stored = 100 * INTERVAL_NS, 0, {}
    steps = [*(minute * 60 * 10**9 for minute in minutes), *(INTERVAL_NS // 2,) * (2 * pause)]
    for at, step in enumerate(steps):
        now_ns, number = now_ns + step, number + 1
        if at < len(minutes):
            name = manifest_name(job="files", epoch=0, step=0, host="host", random=f"{at:032x}")
            one = LiveManifest("a" * 32, f"cs-{at:06x}", name, "ab" * 32)
            log.apply(number, _commit(one, f"{number:032x}"), now_ns)
            stored[name] = now_ns
        old = [name for name in list(stored)[:-keep_last] if stored[name] < now_ns - days * INTERVAL_NS]
        if old := old[: reader.may_go(old, now_ns)]:
            number += 1
            log.apply(number, LogRemove(nonce=f"{number:032x}", manifests=tuple(old)), now_ns)
            for name in old:
                del stored[name]
        reader.stored, reader._waiting = {*stored}, None
        assert reader.waiting == {}
    # Nothing is kept for ever: twice as many may go each day.
    if pause > days + 14:
        assert len(stored) <= max(keep_last, FREE)


def _commit(one: LiveManifest, nonce: str) -> LogCommit:
    return LogCommit(
        nonce=nonce,
        repository=one.repository,
        snapshot=one.snapshot,
        manifest=one.manifest,
        digest=one.digest,
    )


class Remote:
    """Logs in a bucket whose clock is the test's."""

    def __init__(self) -> None:
        self.now_ns = 100 * INTERVAL_NS
        self.bucket = Bucket(lambda: self.now_ns)
        self.ids = Ids("remote")
        self.ends: dict[str, int] = {}

    def append(self, writer: str, entry: Callable[[str], LogEntry]) -> int:
        """Append to a log, and return the number of the entry."""
        number = self.ends.get(writer, 0)
        assert create_entry(self.bucket, SEALS, writer, number, entry(self.ids.hex()))
        self.ends[writer] = number + 1
        self.now_ns += 10**9
        return number

    def host(self, writer: str, snapshots: int) -> dict[str, LiveManifest]:
        """Have a host commit so many snapshots, one an hour."""
        self.append(writer, lambda nonce: LogHello(nonce=nonce, host="host", repository=writer))
        made = {}
        for number in range(snapshots):
            name = manifest_name(job="files", epoch=0, step=0, host="host", random=self.ids.hex())
            self.bucket.create(name, b"manifest")
            made[name] = LiveManifest(writer, f"cs-{number:06x}", name, "ab" * 32)
            self.append(writer, partial(_commit, made[name]))
            self.now_ns += HOUR_NS
        return made

    def remove(self, writer: str, manifests: Iterable[str]) -> int:
        return self.append(writer, lambda nonce: LogRemove(nonce=nonce, manifests=tuple(manifests)))

    def state(self, writer: str, live: Iterable[LiveManifest], removed: Iterable[str] = ()) -> int:
        return self.append(
            writer, lambda nonce: LogState(nonce=nonce, live=tuple(live), removed=tuple(removed))
        )

    def forge(self, attack: str, made: Mapping[str, LiveManifest]) -> None:
        """Append commits that have no manifest of their own."""
        for number, one in enumerate(made.values()):
            name = manifest_name(job="files", epoch=0, step=0, host="host", random=self.ids.hex())
            some = {
                "commits for other repositories": [replace(one, repository=f"{number + 1:032x}")],
                "commits as one snapshot": [replace(one, snapshot="cs-ffffff")],
                "other manifests of the same snapshots": [replace(one, manifest=name)],
                "many commits of nothing": [
                    replace(one, manifest=name, snapshot=f"cs-{number + 0xF00000:06x}")
                ],
                "many commits of one manifest": [
                    replace(next(iter(made.values())), snapshot=f"cs-{number + 0xF00000:06x}")
                ],
            }[attack]
            for forged in some:
                self.append("f" * 32, partial(_commit, forged))

    def reader(self, known: LogReader | None = None, *, whole: bool = False) -> LogReader:
        """Return a reader that has read, with the memory of another."""
        made = LogReader(self.bucket, SEALS, threads=1, whole=whole, skip_damaged=True)
        made.logs = {} if known is None else {writer: one.copy() for writer, one in known.logs.items()}
        made.refresh()
        made.look_back()
        return made


ATTACKS = (
    "own log",
    "many logs",
    "sum in the host's log",
    "sum after a gap",
    "sum before an unreadable entry",
    "removals, then sums",
    "a sum that removes",
    *(
        FORGED := (
            "commits for other repositories",
            "commits as one snapshot",
            "other manifests of the same snapshots",
            "many commits of nothing",
            "many commits of one manifest",
        )
    ),
)


@given(st.sampled_from(ATTACKS), st.integers(8, 40), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_a_hosts_key_hides_at_most_half_of_another_host(
    attack: str, snapshots: int, knows: bool, whole: bool
) -> None:
    """By whatever entries, to whoever reads for the first time and who has read before: half stays, and the newest."""
    remote = Remote()
    made = remote.host("a" * 32, snapshots)
    known = remote.reader() if knows else None
    match attack:
        case "own log":
            remote.append("c" * 32, lambda nonce: LogHello(nonce=nonce, host="evil", repository="c" * 32))
            remote.remove("c" * 32, made)
        case "many logs":
            for number, name in enumerate(reversed(made)):
                remote.remove(f"{number:032x}", [name])
        case "sum in the host's log":
            remote.state("a" * 32, ())
        case "sum after a gap":
            remote.ends["a" * 32] += 5
            remote.state("a" * 32, ())
        case "sum before an unreadable entry":
            number = remote.state("a" * 32, ())
            remote.bucket.create(f"w/{'a' * 32}/{number + 1:010}", b"no entry")
        case "removals, then sums":
            for name in made:
                remote.remove("a" * 32, [name])
            remote.state("a" * 32, ())
            remote.state("a" * 32, ())
        case "a sum that removes":
            remote.state("c" * 32, (), made)
        case _:
            remote.forge(attack, made)
            remote.remove("f" * 32, list(made)[1:] if attack == FORGED[-1] else made)
    reader = remote.reader(known, whole=whole)
    if attack in FORGED:
        assert len(reader.live().keys() & made.keys()) >= snapshots - max(FREE, snapshots // 2)
        return
    assert attack in ("many logs", "removals, then sums") or reader.live().keys() == made.keys()
    assert len(reader.live()) >= snapshots - max(FREE, snapshots // 2)
    # Of a repository that had some a day before.
    assert snapshots < 26 or list(made)[-1] in reader.live()
    assert reader.live().keys().isdisjoint(reader.removed())
    assert {*reader.live(), *reader.removed()} == made.keys()
    if reader.damaged:
        return
    # What is summed up by who knows says the same to all, whoever reads that alone; and again.
    for _ in range(2):
        summed = reader.logs["a" * 32]
        waiting = reader.waiting.keys()
        first = remote.state("a" * 32, reader.live().values(), {*summed.removed} | waiting)
        remote.bucket.delete(
            [
                name
                for name in remote.bucket.objects
                if name.startswith("w/") and name < f"w/{'a' * 32}/{first:010}"
            ]
        )
        remote.now_ns += 3 * INTERVAL_NS
        after = remote.reader()
        assert after.live().keys() == reader.live().keys()
        assert after.waiting.keys() == reader.waiting.keys()
        reader = after


@given(st.integers(30, 40))
@settings(max_examples=10)
def test_what_a_person_approves_goes_and_nothing_else(snapshots: int) -> None:
    """An approval is of the snapshots that the person saw: what logs give up later waits again."""
    remote = Remote()
    made = remote.host("a" * 32, snapshots)
    remote.remove("c" * 32, list(made)[:-2])
    assert remote.reader().waiting
    content = StoredApproval(host="me", manifests=tuple(made)[:-2])
    create_approval(remote.bucket, SEALS, "1" * 32, content)
    reader = remote.reader()
    assert reader.live().keys() == set(list(made)[-2:])
    assert not reader.waiting
    remote.remove("c" * 32, made)
    assert remote.reader().waiting.keys() == set(list(made)[-2:])

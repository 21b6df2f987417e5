"""Questions to a simulated fleet, each answered by a table."""

from __future__ import annotations

import heapq
import os
import random
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from benchmarks.fleet.hosts import CHUNKS, PACK_BYTES, open_fleet
from benchmarks.fleet.store import (
    BYTES_A_SECOND,
    DOLLARS,
    MEDIAN_SECONDS,
    SIGMA,
    Clock,
    Partitions,
    SimulatedStore,
    Usage,
)
from ciuic.remote.host_status import read_statuses, stored_by_host
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import MANIFESTS_PREFIX, new_pack_ref, pack_name
from ciuic.remote.remote_index import RemoteIndex, list_packs
from ciuic.remote.writer_log import LogRotation
from ciuic.repository.model import PackRecord
from ciuic.types import ChunkId

FLEET: Final = 10_000
BYTES_A_DAY: Final = 10**15
PACKS_A_HOST_AND_DAY: Final = BYTES_A_DAY / FLEET / PACK_BYTES
_DAY: Final = 86_400
_TABLE_SECONDS: Final = MEDIAN_SECONDS["GET"] * 1.107
"""Mean of the distribution, whose median is the constant."""
_INDEX_THREADS: Final = 16
_SNAPSHOTS: Final = 2


class Table(NamedTuple):
    """Answer: a table and what it says."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str

    def lines(self) -> Iterator[str]:
        """Yield the lines of a section of a page."""
        yield from (f"## {self.title}", "")
        yield "| " + " | ".join(self.head) + " |"
        yield "| " + " | ".join("---" for _ in self.head) + " |"
        yield from ("| " + " | ".join(row) + " |" for row in self.rows)
        yield from ("", self.text, "")


class Measured(NamedTuple):
    """What was measured of a fleet of one size."""

    hosts: int
    upload: Usage
    new_host: Usage
    status: Usage
    collection: Usage
    after: Usage
    """First upload of another host after the collection."""
    own_sum: Usage
    """Summing up its own log by a host."""
    log_cache_bytes: int
    log_memory_bytes: int


def number(value: float) -> str:
    """Return a number for people, of three digits or whole thousands."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Return a duration for people."""
    for limit, unit in ((2 * _DAY, "d"), (7200, "h"), (120, "min")):
        if value >= limit:
            return f"{value / {'d': _DAY, 'h': 3600, 'min': 60}[unit]:.3g} {unit}"
    return f"{value:.3g} s"


def size(value: float) -> str:
    """Return a number of bytes for people."""
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} bytes"


def measure(hosts: int) -> Measured:
    """Run a fleet of this size: uploads, a new host, the status of all, a collection after each host gave up a snapshot."""
    with open_fleet(hosts, _SNAPSHOTS) as fleet:
        with fleet.store.measured() as upload:
            fleet.hosts[0].upload(fleet.snapshots(1)[0])
            fleet.hosts[0].report()
        with fleet.store.measured() as new_host:
            (new,) = fleet.add_hosts(1)
        with fleet.store.measured() as status:
            read_statuses(fleet.store, fleet.remote.sealer)
            stored_by_host(fleet.store.list(MANIFESTS_PREFIX))
        with fleet.store.measured() as own_sum:
            host = fleet.hosts[0]
            rotation = LogRotation(
                fleet.store, fleet.remote.sealer, host.log, host.reader, max_entries=_SNAPSHOTS
            )
            rotation.tidy()
        cache = fleet.top / new.name / "logs"
        tracemalloc.start()
        reader = LogReader(fleet.store, fleet.remote.sealer, cache_path=str(cache))
        log_memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(reader.live()) == hosts * _SNAPSHOTS + 1
        for host in fleet.hosts[:hosts]:
            host.uploader.give_up(host.manifests[:1])
        fleet.pass_days(2)
        collection, spaces = fleet.collect()
        assert sum(len(space.packs) for space in spaces) == 2 * hosts
        with fleet.store.measured() as after:
            fleet.hosts[0].upload(fleet.snapshots(1)[0])
        return Measured(
            hosts,
            upload[0],
            new_host[0],
            status[0],
            collection,
            after[0],
            own_sum[0],
            cache.stat().st_size,
            log_memory,
        )


def extrapolated(runs: Sequence[Measured], of: Callable[[Measured], float], hosts: int = FLEET) -> float:
    """Return a value at more hosts, by the line through the two largest runs."""
    before, last = runs[-2:]
    rise = (of(last) - of(before)) / (last.hosts - before.hosts)
    return of(last) + rise * (hosts - last.hosts)


def deviation(runs: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    """Return by how much the largest run differs from what the two before it foretell, as a share."""
    foretold = extrapolated(runs[:-1], of, runs[-1].hosts)
    return abs(of(runs[-1]) - foretold) / of(runs[-1])


def _requests(work: Literal["new_host", "collection", "status"], kind: str) -> Callable[[Measured], float]:
    def of(run: Measured) -> float:
        used: Usage = getattr(run, work)
        return used.requests[kind]

    return of


def requests_by_interval(runs: Sequence[Measured]) -> Table:
    """Requests and prices of a host and day."""
    done = runs[-1].upload
    # Without the data pack, and with the status.
    puts, gets = done.requests["PUT"] - 1, done.requests["GET"]
    rows = []
    for name, interval in (("1 min", 60), ("5 min", 300), ("15 min", 900), ("1 h", 3600), ("6 h", 21_600)):
        snapshots = _DAY / interval
        packs = max(PACKS_A_HOST_AND_DAY, snapshots)
        dollars = (packs + puts * snapshots) * DOLLARS["PUT"] + gets * snapshots * DOLLARS["GET"]
        share = puts * snapshots / (packs + puts * snapshots)
        rows.append(
            (
                name,
                number(packs),
                number(puts * snapshots),
                number(gets * snapshots),
                f"{share:.0%}",
                f"${dollars:.3f}",
                f"${dollars * FLEET:,.0f}",
            )
        )
    knee = _DAY / (PACKS_A_HOST_AND_DAY / puts)
    return Table(
        "Requests and cost of a host and day, by the interval of snapshots",
        (
            "interval",
            "PUT of data",
            "other PUT",
            "GET",
            "share of the others",
            "a host and day",
            f"{FLEET:,} hosts and day",
        ),
        rows,
        f"Run: one upload of the real uploader beside 1 to {runs[-1].hosts:,} hosts. It takes {puts + 1} PUT (a data pack, a pack of tree nodes, the manifest, the entry of "
        f"the log, the status) and {gets} GET, whatever the number of hosts. Extrapolated: {number(PACKS_A_HOST_AND_DAY)} data packs of 16 MiB for 100 GB a host and day. "
        f"**Knee**: at an interval of {seconds(knee)} what comes with each snapshot costs as much as the data; above 15 minutes it is lost beside it. "
        f"After 1,024 entries, 17 h at one a minute, a host sums up its log and reads what is new in all others: {number(runs[-1].own_sum.requests['GET'])} GET where {runs[-1].hosts:,} hosts had made {_SNAPSHOTS + 1} entries each, "
        f"so about a thousand for each host that shares, ${1024 * DOLLARS['GET'] * 1000 * 1000:,.0f} a day for a thousand hosts at this interval.",
    )


def new_hosts(runs: Sequence[Measured]) -> Table:
    """Return a table of the reads of a host before its first upload."""
    rows = [_usage_row(f"{run.hosts:,}", run.new_host) for run in runs]
    rows.append(
        (
            f"*{FLEET:,}*",
            *(f"*{number(extrapolated(runs, _requests('new_host', kind)))}*" for kind in ("LIST", "GET")),
            f"*{size(extrapolated(runs, lambda run: run.new_host.received_bytes))}*",
            f"*{seconds(extrapolated(runs, lambda run: run.new_host.seconds))}*",
        )
    )
    return Table(
        "What a new host reads before its first upload",
        ("hosts", "LIST", "GET", "bytes", "time"),
        rows,
        f"Run: all rows but the last, with {_SNAPSHOTS} snapshots of two packs a host. The last is on the line of the two before it; the line through the runs "
        f"before foretells the largest one to {deviation(runs, lambda run: run.new_host.requests['GET']):.1%} in GETs and {deviation(runs, lambda run: run.new_host.seconds):.0%} in time. "
        "It is a GET for each entry of each log since that log's last sum, one for the table of each pack, and a LIST for each thousand of both.",
    )


def _usage_row(name: str, used: Usage) -> tuple[str, ...]:
    return (
        name,
        number(used.requests["LIST"]),
        number(used.requests["GET"]),
        size(used.received_bytes),
        seconds(used.seconds),
    )


def sharing(runs: Sequence[Measured]) -> Table:
    """What sharing costs by the number of hosts that share one space, at the full rate."""
    rows = []
    for hosts in (1, 10, 30, 100, 1000, FLEET):
        tables = hosts * PACKS_A_HOST_AND_DAY
        gets = tables * FLEET * DOLLARS["GET"]
        lists = tables / 1000 * FLEET * DOLLARS["LIST"]
        rows.append(
            (
                f"{hosts:,}",
                number(tables),
                seconds(tables * _TABLE_SECONDS / _INDEX_THREADS),
                f"${gets + lists:,.0f}",
                seconds(7 * tables * _TABLE_SECONDS / _INDEX_THREADS),
            )
        )
    used = runs[-1].after.requests
    upload_dollars = PACKS_A_HOST_AND_DAY * FLEET * DOLLARS["PUT"]
    knee = upload_dollars / (PACKS_A_HOST_AND_DAY * FLEET * (DOLLARS["GET"] + DOLLARS["LIST"] / 1000))
    return Table(
        "What sharing costs: tables of the packs of others",
        (
            "hosts that share",
            "new tables a day",
            "time of a host and day",
            f"{FLEET:,} hosts and day",
            "new host, 7 days kept",
        ),
        rows,
        f"Run: after a collection the next upload of a host that had begun before all others took {used['GET']} GET and {used['LIST']} LIST at {runs[-1].hosts:,} hosts: it reads the "
        "table of each pack that others stored since it looked last. A host looks when its process begins, and after each collection that condemned something. Extrapolated: "
        f"the packs, and one such look a day. **Knee**: {knee:.0f} hosts, where reading tables costs as much as storing all packs (${upload_dollars:,.0f} a day), and about 30 "
        "hosts, from which a host reads for 5 minutes a day. This is the first limit that a fleet reaches. It is one of *sharing*: hosts "
        "that have no content in common gain nothing by it, and a repository with an identity of its own reads its own packs alone (first row).",
    )


def index_sizes(runs: Sequence[Measured], packs: Sequence[int]) -> Table:
    """Bytes of the index, of the cache of logs, and memory."""
    rows = []
    for count in packs:
        file_bytes, listing_bytes = _index_of(count)
        rows.append(
            (
                f"{count:,}",
                f"{count * CHUNKS:,}",
                size(file_bytes),
                f"{file_bytes / count / CHUNKS:.1f}",
                f"{listing_bytes / count:.0f}",
            )
        )
    chunk_bytes, pack_bytes = file_bytes / count / CHUNKS, listing_bytes / count
    all_packs = 7 * PACKS_A_HOST_AND_DAY * FLEET
    for hosts in (1, 100, FLEET):
        some = all_packs * hosts / FLEET
        rows.append(
            (
                f"*{number(some)}* ({hosts:,} hosts share, 7 days)",
                f"*{number(some * CHUNKS)}*",
                f"*{size(some * CHUNKS * chunk_bytes)}*",
                "",
                f"*{size(some * pack_bytes)} in all*",
            )
        )
    last = runs[-1]
    snapshots = last.hosts * _SNAPSHOTS + 1
    cached, memory = last.log_cache_bytes / snapshots, last.log_memory_bytes / snapshots
    limit = (256 << 20) / cached
    return Table(
        "Bytes and memory of the index",
        ("packs", "chunks", "index on the disk", "bytes a chunk", "memory of a listing, bytes a pack"),
        rows,
        f"Run: the rows without italics, {CHUNKS} chunks a pack; 20 million chunks, differences among them, took 88 bytes each ([benchmarks](benchmarks.md)). The index is read through a cache of 2 MiB, whatever its size; a *listing* of packs is "
        "held in memory while it is compared with it, and so is the content of logs: "
        f"{memory:.0f} bytes of memory and {cached:.0f} bytes of the file `logs` a snapshot that exists (at {last.hosts:,} hosts). **Knees**: a listing takes 1 GiB of memory at "
        f"{number((1 << 30) / pack_bytes)} packs, which 7 days of {(1 << 30) / pack_bytes / PACKS_A_HOST_AND_DAY / 7:.0f} hosts are; the file `logs` is not read any more above 256 MiB, "
        f"{number(limit)} snapshots: {limit / FLEET:.0f} a host of {FLEET:,}. Beyond that each start reads all logs.",
    )


def _index_of(packs: int) -> tuple[int, int]:
    """Return the bytes of an index of so many packs, and the memory of a listing of them."""
    rng = random.Random(packs)
    store = SimulatedStore(Clock())
    with tempfile.TemporaryDirectory() as top:
        index = RemoteIndex.open(f"{top}/index.sqlite")
        for _ in range(packs):
            records = [
                PackRecord(
                    ChunkId(rng.randbytes(16)),
                    64 + at * 200_000,
                    200_000,
                    262_144,
                    1,
                    rng.getrandbits(64),
                    b"",
                )
                for at in range(CHUNKS)
            ]
            ref = new_pack_ref("data")
            index.add(ref, PACK_BYTES, records)
            store.put(pack_name(ref), [b""])
        index.close()
        file_bytes = os.stat(f"{top}/index.sqlite").st_size
    tracemalloc.start()
    listed = list_packs(store)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(listed) == packs
    return file_bytes, memory


def collections(runs: Sequence[Measured]) -> Table:
    """Time and requests of one collection."""
    rows = [
        (
            *_usage_row(f"{run.hosts:,}", run.collection),
            number(run.collection.requests["PUT"]),
            seconds(run.collection.seconds / run.hosts),
        )
        for run in runs
    ]
    rise = [extrapolated(runs, _requests("collection", kind)) for kind in ("LIST", "GET", "PUT")]
    time = extrapolated(runs, lambda run: run.collection.seconds)
    rows.append(
        (
            f"*{FLEET:,}*",
            f"*{number(rise[0])}*",
            f"*{number(rise[1])}*",
            f"*{size(extrapolated(runs, lambda run: run.collection.received_bytes))}*",
            f"*{seconds(time)}*",
            f"*{number(rise[2])}*",
            f"*{seconds(time / FLEET)}*",
        )
    )
    return Table(
        "One collection",
        ("hosts", "LIST", "GET", "bytes", "time", "PUT", "time a host"),
        rows,
        f"Run: `ciuic prune --remote` on a host that has no cache, with the real marking, after each host gave up one of its {_SNAPSHOTS} snapshots. The runs before the largest "
        f"foretell its time to {deviation(runs, lambda run: run.collection.seconds):.0%}. For each host: a fence (PUT, GET), a look whether it is silent (HEAD); "
        "for each snapshot its manifest and a pack of tree nodes; for each pack its table, twice (reader and collector have an index each). "
        "All but the packs of tree nodes are read side by side. Logs, fences, manifests and looks were made one after the other before: "
        "39 s at 100 hosts and 142 s at 400, now 13 s and 37 s. **Knee**: none in the number of hosts; time is a line. It is one in packs: "
        f"a first collection of 7 days of 100 hosts reads {number(2 * 7 * 100 * PACKS_A_HOST_AND_DAY)} tables in {seconds(2 * 7 * 100 * PACKS_A_HOST_AND_DAY * _TABLE_SECONDS / _INDEX_THREADS)}, "
        f"a daily one with its cache {seconds(2 * 100 * PACKS_A_HOST_AND_DAY * _TABLE_SECONDS / _INDEX_THREADS)}. A round condemns at most 524,288 packs (8 TiB), and `prune` makes as many rounds as are needed.",
    )


def fleet_status(runs: Sequence[Measured]) -> Table:
    """Cost of `ciuic fleet status`."""
    rows = [_usage_row(f"{run.hosts:,}", run.status) for run in runs]
    rows.append(
        (
            f"*{FLEET:,}*",
            *(f"*{number(extrapolated(runs, _requests('status', kind)))}*" for kind in ("LIST", "GET")),
            f"*{size(extrapolated(runs, lambda run: run.status.received_bytes))}*",
            f"*{seconds(extrapolated(runs, lambda run: run.status.seconds))}*",
        )
    )
    pages = 60 / (MEDIAN_SECONDS["LIST"] * 1.107 + 300_000 / BYTES_A_SECOND)
    return Table(
        "`ciuic fleet status`",
        ("hosts", "LIST", "GET", "bytes", "time"),
        rows,
        f"Run: all rows but the last, with {_SNAPSHOTS} snapshots a host. A GET for each status, 32 side by side; and a LIST for each thousand manifests, one after the other. **Knee**: "
        f"above {number(pages * 1000)} snapshots in the remote ({number(pages * 1000 / FLEET)} a host of {FLEET:,}) the listing of manifests takes more than a minute. "
        f"At most 20,000 statuses are read. A host costs {4 * 24} to 1,440 PUT of its status a day: $0.0005 to $0.007.",
    )


def dedup_loss(counts: Iterable[int]) -> Table:
    """Copies of one content that several hosts upload."""
    rows = []
    for count in counts:
        with open_fleet(count) as fleet:
            (same,) = fleet.snapshots(1)
            fleet.add_hosts(1)
            for host in fleet.hosts:
                host.upload(same)
            copies = fleet.store.count("packs/data/")
            fleet.add_hosts(1)[0].upload(same)
            later = fleet.store.count("packs/data/") - copies
            fleet.pass_days(2)
            fleet.collect()
            rows.append(
                (f"{count + 1:,}", f"{copies:,}", f"{later}", f"{fleet.store.count('packs/data/'):,}")
            )
    return Table(
        "Hosts that upload the same at once",
        ("hosts", "copies stored", "stored by a host that begins later", "copies after the next collection"),
        rows,
        "Run: all of it. A host learns of the packs of others when its process begins and after a collection, not between: what hosts store at once, or at any time until then, is stored by each of them. "
        "The copies cost the upload and their space until a collection that is a day later, which keeps one. **Knee**: none, the loss is the number of hosts; data that is "
        "the same on all hosts (a data set, a base image) is uploaded by one of them first, and the uploaders of others start after it.",
    )


_ARRANGEMENTS: Final = (
    ("spread over 5 min", 300.0, ()),
    ("all at one moment", 1.0, ()),
    (
        "the same, `packs/data/` divided into 16",
        1.0,
        tuple(f"packs/data/{digit}" for digit in "0123456789abcdef"),
    ),
)


class _Burst(NamedTuple):
    refused: Counter[str]
    requests: int
    peak: int
    slowest_seconds: float
    partitions: int


def prefixes(counts: Sequence[int], packs_each: int) -> Table:
    """Requests of a whole fleet against the limits of the store."""
    trace = _trace_of_an_upload()
    rows = []
    for count in counts:
        for name, spread, parts in _ARRANGEMENTS:
            burst = _replay(trace, count, packs_each, spread, parts)
            hot = ", ".join(
                f"{top} {share / sum(burst.refused.values()):.0%}"
                for top, share in burst.refused.most_common(2)
            )
            rows.append(
                (
                    f"{count:,}",
                    name,
                    number(burst.peak),
                    f"{sum(burst.refused.values()) / (burst.requests + sum(burst.refused.values())):.1%}",
                    hot or "none",
                    seconds(burst.slowest_seconds),
                    str(burst.partitions),
                )
            )
    return Table(
        "Limits of request rates",
        (
            "hosts",
            "snapshots",
            "most requests a second in a partition",
            "answers 503",
            "where",
            "slowest upload",
            "partitions at the end",
        ),
        rows,
        f"Run: the requests of one upload of the real uploader, replayed for each host with new random names, {packs_each} data packs of 16 MiB over four connections (5 minutes of "
        "100 GB a day). The bucket begins as one partition. **Knee**: evenly spread, 10,000 hosts make about 830 PUT a second and stay below the 3,500 of one partition. At one moment, a few hundred "
        "hosts fill it: four connections each are 4 PUT in each 0.25 s. `packs/data/` gets hot first, as most requests go there; its 256 directories have random names, so that the store can divide it, but it does so only where load lasts for minutes, "
        "and a burst is shorter. Nothing is lost: uploads wait, and the burst takes as long as one partition needs for it. Divided into 16, as stores do on request or after steady load, 1,000 hosts do not show, and 10,000 take a quarter of the time. "
        "No other prefix comes near by itself, though what shares a partition with packs waits with them: names below `w/`, `manifests/` and `status/` have random or per-host parts, and one request a snapshot.",
    )


def _trace_of_an_upload() -> list[tuple[str, str, int]]:
    with open_fleet(1, 1) as fleet:
        (id_,) = fleet.snapshots(1)
        fleet.store.trace = []
        fleet.hosts[0].upload(id_)
        fleet.hosts[0].report()
        return fleet.store.trace


_OUT: Final = 4
_SPREADING: Final = 0x9E3779B97F4A7C15F39CC0605CEDC835


def _replay(
    trace: Sequence[tuple[str, str, int]],
    hosts: int,
    packs_each: int,
    spread: float,
    parts: Iterable[str] = (),
) -> _Burst:
    rng = random.Random(hosts)
    partitions = Partitions(parts)
    # Requests that follow each other; of the data packs four are under way.
    after = [(kind, name, sent) for kind, name, sent in trace if not name.startswith("packs/data/")]
    begun = [rng.uniform(0, spread) for _ in range(hosts)]
    packs_left = [packs_each] * hosts
    under_way = [0] * hosts
    queue: list[tuple[float, int, int, float]] = []
    for host, start in enumerate(begun):
        for _ in range(min(_OUT, packs_each)):
            packs_left[host] -= 1
            under_way[host] += 1
            queue.append((start, host, -1, 0.1))
    heapq.heapify(queue)
    requests, slowest = 0, 0.0
    names: dict[tuple[int, int], str] = {}
    while queue:
        now, host, step, pause = heapq.heappop(queue)
        kind, name, sent = ("PUT", "packs/data/", PACK_BYTES) if step < 0 else after[step]
        if pause == 0.1:
            # A retried request has its name.
            name = _renamed(name, rng, host)
        else:
            name = names.pop((host, step), "") or _renamed(name, rng, host)
        if not partitions.take(kind, name, now):
            names[host, step] = name
            heapq.heappush(queue, (now + pause * rng.uniform(0.5, 1.5), host, step, min(2 * pause, 15.0)))
            continue
        requests += 1
        now += MEDIAN_SECONDS[kind] * rng.lognormvariate(0, SIGMA) + sent / BYTES_A_SECOND
        if step < 0:
            if packs_left[host]:
                packs_left[host] -= 1
                heapq.heappush(queue, (now, host, -1, 0.1))
                continue
            under_way[host] -= 1
            if under_way[host]:
                continue
        if step + 1 < len(after):
            heapq.heappush(queue, (now, host, step + 1, 0.1))
        else:
            slowest = max(slowest, now - begun[host])
    return _Burst(partitions.refused, requests, max(partitions.peak.values()), slowest, partitions.count)


def _renamed(name: str, rng: random.Random, host: int) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    # As random as a name that a host keeps: a product spreads neighbours over all digits.
    own = f"{(host + 1) * _SPREADING % (1 << 128):032x}"
    top, _, rest = name.partition("/")
    if top == "packs":
        return f"{'/'.join(name.split('/')[:2])}/{digits[:2]}/{digits}"
    if top == "w":
        return f"w/{own}/{rest.rpartition('/')[2]}"
    if top == "manifests":
        return f"manifests/files/0-0/node-{host:05d}-{digits}"
    return f"{top}/{own}"

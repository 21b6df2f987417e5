"""Page with the answers."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from benchmarks.fleet.questions import Table
from benchmarks.fleet.store import (
    BYTES_A_SECOND,
    DOLLARS,
    GETS_A_SECOND,
    MEDIAN_SECONDS,
    MIB,
    PUTS_A_SECOND,
    SIGMA,
    SPLIT_SECONDS,
)

_HEAD = """# Ten thousand hosts

What a remote costs a fleet of 10,000 hosts that store 1 PB a day (100 GB a host, after compression and deduplication), and where each curve has its knee. Written by
`python -m benchmarks.fleet {form}--write docs/scale.md` on {date}; all figures are requests, bytes and *simulated* seconds, the same on any machine.

**What was run.** The code that ships: uploader, logs, rounds, index, status, reading and collection (`ciuic.remote`), of up to {largest:,} hosts in one process, against a model of an object store. Snapshots are
real, but small: a pack of {chunks} chunks counts as 16 MiB. **What was not**: 10,000 hosts, 1 PB, a real store. Rows in *italics*, and what is called *extrapolated*, are computed from the runs; each section says by
how much a run of {largest:,} hosts differs from what smaller ones foretell. Times are those of waiting for the store: processor time, disks and the hosts' own lines are left out.

**The model.** {latencies}; each the median of a log-normal distribution (sigma {sigma}), and {rate} MiB/s a connection. A partition takes {puts:,} PUT and DELETE and {gets:,} GET, HEAD and LIST a second, answers 503 to what
is more, and is divided after {split} seconds above four fifths of that; clients wait from 0.1 s on, twice as long each time. A LIST has 1,000 names. {prices} for a thousand requests; DELETE is free. Storage (1 PB a
month costs about $23,000) and traffic are not included.

**A server with 100,000 objects.** With 101,000 packs on a SeaweedFS that answers as late as the model, an upload with nothing new takes 132 LIST, 6 GET and 5 s, `prune` 128 LIST and 5 s, `remote status --contact` 257 LIST and 9 s (without a cache a GET for each entry of the logs besides), `--repo URL list` 6 LIST and 1 s,
each less than 140 MiB of memory, and all are lines in the number of packs: above 8,000 these are listed by 32 parts of their names side by side ([results](../benchmarks/results/2026-11-many-objects.md)).

## What an operator does

* **Share only what is the same.** The first limit is sharing (below): each host reads the tables of all packs that others stored in its space. Give each group of 10 to 30 hosts that have content in common (the ranks of a training, one image) a
  remote of its own: another prefix of the same bucket (`s3://bucket/group-017`) is enough. Then the figures of this page are those of a group, and of the fleet 300 to 1,000 times that, in parallel. Hosts without common content
  lose nothing by a remote each.
* **Upload every 15 minutes or less often** ([`remote.schedule.interval`](configuration.md)); local snapshots may be as frequent as one likes.
* **Spread the moments.** Timers of all hosts at the full minute are what makes a store answer 503; a random delay of some minutes (`RandomizedDelaySec=`) takes the burst away.
* **Collect each group daily, from one host that keeps its cache**: it reads what is new. Collections of groups run side by side.
* **Start uploaders of equal hosts after one of them has uploaded** what all have.

"""

_TAIL = """## Larger changes that would move the knees

| change | what it moves | cost |
| --- | --- | --- |
| A running uploader does not list and read the tables of others after a collection, but only drops what was condemned | the table reads of "what sharing costs" fall to those of restarts | hosts that run for long learn nothing of each other's content: sharing between them ends |
| Tables of many packs in one object, written by the collector | a new host reads 1 GET for a thousand tables | a new kind of object in the format, kept right by collections |
| An index shared by reader and collector | halves the table reads of a collection | both rely on one file; a reader must not see what a round is about to take |
| Packs of tree nodes read ahead while marking | the only part of a collection that is read one after the other | an order of reading apart from that of the walk |
| A listing that streams into the index instead of memory | the memory of a listing | a temporary table; the comparison in SQL |
"""


def page(tables: Sequence[Table], date: datetime.date, sizes: Sequence[int]) -> str:
    """Return the page in Markdown."""
    from benchmarks.fleet.hosts import CHUNKS

    head = _HEAD.format(
        date=date,
        form="--full " if max(sizes) >= 1000 else "",
        largest=max(sizes),
        chunks=CHUNKS,
        latencies=", ".join(f"{kind} {seconds * 1000:.0f} ms" for kind, seconds in MEDIAN_SECONDS.items()),
        sigma=SIGMA,
        rate=BYTES_A_SECOND // MIB,
        puts=PUTS_A_SECOND,
        gets=GETS_A_SECOND,
        split=SPLIT_SECONDS,
        prices=f"PUT and LIST cost ${DOLLARS['PUT'] * 1000:.3f}, GET and HEAD ${DOLLARS['GET'] * 1000:.4f}",
    )
    return head + "\n".join(line for table in tables for line in table.lines()) + "\n" + _TAIL

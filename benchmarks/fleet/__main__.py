"""Simulation of a fleet of ten thousand hosts: the figures of docs/scale.md.

    python -m benchmarks.fleet                            short form, in two minutes; prints the page
    python -m benchmarks.fleet --full --write docs/scale.md

Needs `tests` in PYTHONPATH, as all benchmarks do.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

from benchmarks.fleet import questions
from benchmarks.fleet.page import page


def main() -> int:
    """Run the fleets, and print or write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--full", action="store_true", help="up to 1,000 hosts in full, 10,000 in the replay: some minutes"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    options = parser.parse_args()
    sizes = (1, 10, 100, 1000) if options.full else (1, 10, 100)
    os.environ.setdefault("CIUIC_LOG", "error")
    runs = [questions.measure(hosts) for hosts in sizes]
    tables = [
        questions.requests_by_interval(runs),
        questions.new_hosts(runs),
        questions.sharing(runs),
        questions.index_sizes(runs, (1000, 5000, 20_000) if options.full else (1000, 4000)),
        questions.collections(runs),
        questions.prefixes((100, 1000, 10_000) if options.full else (100, 1000), 21),
        questions.fleet_status(runs),
        questions.dedup_loss((1, 9, 99) if options.full else (1, 9)),
    ]
    text = page(tables, datetime.datetime.now(datetime.timezone.utc).date(), sizes)
    if options.write is None:
        sys.stdout.write(text)
    else:
        options.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

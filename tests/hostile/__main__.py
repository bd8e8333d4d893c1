"""`python -m tests.hostile --minutes 60`: every reader for its share of that time, and a table of what became of it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.hostile.harness import Count, Reader, row, try_for
from tests.hostile.over_http import http_readers
from tests.hostile.readers import readers


def survey(minutes: float, first: int = 0, only: str = "") -> dict[str, Count]:
    """Counts by reader; inputs from seed `first` on."""
    with tempfile.TemporaryDirectory() as work, http_readers() as over_http:
        every: list[Reader] = [each for each in [*readers(Path(work)), *over_http] if only in each.name]
        counts = {}
        for reader in every:
            counts[reader.name] = try_for(reader, 60 * minutes / len(every), first)
            print(row(reader.name, counts[reader.name]), flush=True)
            for line in counts[reader.name].failed[:20]:
                print(f"    {line}", file=sys.stderr, flush=True)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first input")
    parser.add_argument("--only", default="", help="readers whose names have this in them")
    args = parser.parse_args()
    found = survey(args.minutes, args.first, args.only)
    print(row("all", Count(read=sum(c.read for c in found.values()), refused=sum(c.refused for c in found.values()),
                           failed=[line for c in found.values() for line in c.failed])))  # fmt: skip
    sys.exit(any(count.failed for count in found.values()))

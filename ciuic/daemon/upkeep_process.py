"""Upkeep under the name by which a daemon of release 0.2 starts it, which may still run when this version is installed."""

from __future__ import annotations

import sys

from ciuic.daemon.jobs import main

if __name__ == "__main__":
    sys.exit(main("upkeep"))

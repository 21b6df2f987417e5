"""Run a capture: ``python -m ciuic.daemon.capture``, as daemons of older versions start it."""

from __future__ import annotations

import sys

from ciuic.daemon.capture.process import main

if __name__ == "__main__":
    sys.exit(main())

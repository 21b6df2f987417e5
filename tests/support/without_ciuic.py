"""Programs that know nothing of ciuic, to open what was written for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# None in sys.modules makes every import of the package an ImportError (docs of the import system).
_HEAD = """
import json, sys, warnings
sys.modules["ciuic"] = None
warnings.simplefilter("ignore")
try:
    import ciuic
except ImportError:
    pass
else:
    raise SystemExit("ciuic can be imported")
"""


def run_without_ciuic(source: str, *arguments: object) -> Any:
    """Run a script in a process that cannot import ciuic; return what it printed last, as JSON."""
    done = subprocess.run(
        [
            sys.executable,
            "-P" if sys.version_info >= (3, 11) else "-E",
            "-c",
            _HEAD + source,
            *map(str, arguments),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

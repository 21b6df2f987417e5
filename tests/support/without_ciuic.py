"""Programs that know nothing of ciuic, to open what was written for them."""

from __future__ import annotations

import json
import os
from typing import Any

from support.warm_python import WarmPython

# Nothing of it was imported, and None in sys.modules makes every import of the package an ImportError (docs of the import system).
_HEAD = """
import json, sys, warnings
assert not [name for name in sys.modules if name.partition(".")[0] == "ciuic"]
sys.modules["ciuic"] = None
warnings.simplefilter("ignore")
try:
    import ciuic
except ImportError:
    pass
else:
    raise SystemExit("ciuic can be imported")
"""


def run_without_ciuic(source: str, *arguments: object, python: WarmPython | None = None) -> Any:
    """Run a script in a process that cannot import ciuic; return what it printed last, as JSON.

    ``python``: has imported what the script needs; None: the script imports it itself.
    """
    if python is None:
        with WarmPython() as python:
            return run_without_ciuic(source, *arguments, python=python)
    done = python.run(
        ["-c", _HEAD + source, *arguments], env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

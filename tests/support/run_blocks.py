"""Runner of programs of a page, each forked after the imports, which take longer than the programs.

    python -m support.run_blocks < JOBS

JOBS: JSON with ``modules``, imported before the first fork as far as they are installed, and ``runs``: pairs
of working directory and program, run one after the other. Each program prints for itself; the first that
fails ends the runner with status 1.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import sys
import traceback


def main() -> int:
    jobs = json.load(sys.stdin)
    for module in (*jobs["modules"], "ciuic.training.manager"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    if "torch" in sys.modules:
        # Otherwise the first optimizer of every program imports it.
        importlib.import_module("torch._dynamo")
    gc.freeze()
    for place, code in jobs["runs"]:
        child = os.fork()
        if not child:
            _child(place, code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return 1
    return 0


def _child(place: str, code: str) -> None:
    status = 1
    try:
        os.chdir(place)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())

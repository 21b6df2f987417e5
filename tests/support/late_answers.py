"""Runs an overlay worker whose answers to some lookups come late, for tests:

    python late_answers.py DIRECTORY -m ciuic.fuse_layer.worker ARGUMENT...

While DIRECTORY has a file ``armed``, the first lookup of each name that begins with `LATE` is carried out at once, makes a file
of that name in DIRECTORY, and is answered once there is one named ``go``.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LATE = b"late-"
_POLL_SECONDS = 0.005
_MAX_POLLS = 4000


def _delay_lookups(control: Path) -> None:
    def looked(name: bytes) -> bool:
        """Return whether this lookup is to wait, and tell that it has looked."""
        file = control / os.fsdecode(name)
        if not name.startswith(LATE) or not (control / "armed").exists() or file.exists():
            return False
        file.touch()
        return True

    def polls() -> Iterator[None]:
        """Yield until the answer may go; not for ever, where the test has failed."""
        for _ in range(_MAX_POLLS):
            if (control / "go").exists():
                return
            yield

    if "pyfuse3" in sys.argv:
        import trio

        from ciuic.fuse_layer.pyfuse3_driver import Pyfuse3Driver

        async def lookup(self: Any, parent: Any, name: Any, ctx: Any) -> Any:
            answer = await at_once(self, parent, name, ctx)
            if looked(name):
                for _ in polls():
                    await trio.sleep(_POLL_SECONDS)
            return answer

        at_once: Any = Pyfuse3Driver.lookup
        Pyfuse3Driver.lookup = lookup  # type: ignore[assignment, method-assign]
        return

    from ciuic.fuse_layer.kernel.driver import KernelDriver

    def kernel_lookup(self: Any, request: Any, data: Any) -> Any:
        # Its buffer may be used for the next request while this one waits.
        name = bytes(data[:-1])
        answer = kernel_at_once(self, request, data)
        if looked(name):
            for _ in polls():
                time.sleep(_POLL_SECONDS)
        return answer

    kernel_at_once: Any = KernelDriver._lookup
    KernelDriver._lookup = kernel_lookup  # type: ignore[method-assign]


if __name__ == "__main__":
    _delay_lookups(Path(sys.argv[1]))
    module = sys.argv[3]
    sys.argv[:] = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

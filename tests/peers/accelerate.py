"""Run Accelerate's own tests of `save_state` and `load_state`, with its files and with `store_states`.

    python tests/peers/accelerate.py CHECKOUT/tests/test_state_checkpointing.py …

The tests are those of a checkout of Accelerate that the operator has made, of a version near the installed one; they
also need parameterized. They run twice on the CPU: as they are, and with every Accelerator saving to one
repository. Differences are printed, and the exit status is 1 if a test passes without ours and not with it.
"""

from __future__ import annotations

import sys
from typing import Final

from outcomes import compare_files

# One repository for all: a test loads with a second Accelerator what the first has saved, as a program would in its
# next run. Its manager is closed before, as the end of a run does.
_HOOKS: Final = """

def _ours(module):
    theirs, managers = module.Accelerator.__init__, []
    where = os.path.join(tempfile.mkdtemp(), "snapshots")

    def __init__(self, *args, **kwargs):
        theirs(self, *args, **kwargs)
        from ciuic.integrations.accelerate import store_states
        while managers:
            managers.pop().close()
        managers.append(store_states(where, self))
    module.Accelerator.__init__ = __init__

if VARIANT:
    after_import({"accelerate.accelerator": _ours})
os.environ["ACCELERATE_USE_CPU"] = "true"
"""


if __name__ == "__main__":
    sys.exit(compare_files(__doc__, _HOOKS))

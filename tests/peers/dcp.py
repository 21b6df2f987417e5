"""Run PyTorch's own tests of torch.distributed.checkpoint, with torch's file storage and with ours in its place.

    python tests/peers/dcp.py CHECKOUT/test/distributed/checkpoint/test_file_system_checkpoint_cpu.py …

The tests are those of a checkout of PyTorch that the operator has made; nothing of it is in this repository. Each
file runs twice, in processes of its own, under gloo on the CPU: tests that ask for several GPUs get as many
processes. Differences are printed, and the exit status is 1 if a test passes with torch's classes and not with
ours.
"""

from __future__ import annotations

import sys
from typing import Final

from outcomes import compare_files

_HOOKS: Final = """
def _on_cpu(module):
    module.skip_if_lt_x_gpu = lambda *_, **__: (lambda test: test)

def _ours(package):
    from ciuic.training.dcp import filesystem
    for name in ("FileSystemWriter", "FileSystemReader"):
        theirs, ours = getattr(package, name), getattr(filesystem, name)
        for module in [one for key, one in sys.modules.items() if key.startswith("torch.distributed.checkpoint")]:
            if vars(module).get(name) is theirs:
                setattr(module, name, ours)

after_import({"torch.testing._internal.common_distributed": _on_cpu})
if VARIANT:
    after_import({"torch.distributed.checkpoint": _ours})
"""


if __name__ == "__main__":
    sys.exit(compare_files(__doc__, _HOOKS))

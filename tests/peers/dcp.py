"""Run PyTorch's own tests of torch.distributed.checkpoint, with torch's file storage and with ours in its place.

    python tests/peers/dcp.py CHECKOUT/test/distributed/checkpoint/test_file_system_checkpoint_cpu.py …

The tests are those of a checkout of PyTorch that the operator has made; nothing of it is in this repository. Each
file runs twice, in processes of its own, under gloo on the CPU: a copy of it is made in which `cuda` and `nccl` are
replaced, and tests that ask for several GPUs get as many processes, which are forked. Differences are printed, and
the exit status is 1 if a test passes with torch's classes and not with ours.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from outcomes import compare_files

_HOOKS: Final = """
def _on_cpu(module):
    module.skip_if_lt_x_gpu = lambda *_, **__: (lambda test: test)
    module.requires_nccl = lambda: (lambda test: test)
    # Processes that import torch anew take most of the time of a test.
    case = module.MultiProcessTestCase
    case._spawn_processes = lambda self: self._start_processes(sys.modules["torch"].multiprocessing.get_context("fork").Process)

def _fsdp_on_cpu(module):
    theirs = module._init_device_handle
    def on_cpu(state, wrapped, ignored, device_id):
        return theirs(state, wrapped, ignored, sys.modules["torch"].device("cpu"))
    module._init_device_handle = on_cpu

def _shards_on_cpu(module):
    theirs = module.with_comms
    module.with_comms = lambda func=None, init_rpc=True, backend="gloo": theirs(func, init_rpc, "gloo")

os.environ["OMP_NUM_THREADS"] = "1"  # a fork loses OpenMP's threads

def _ours(package):
    from ciuic.training.dcp import filesystem
    for name in ("FileSystemWriter", "FileSystemReader"):
        theirs, ours = getattr(package, name), getattr(filesystem, name)
        for module in [one for key, one in sys.modules.items() if key.startswith("torch.distributed.checkpoint")]:
            if vars(module).get(name) is theirs:
                setattr(module, name, ours)

after_import({
    "torch.testing._internal.common_distributed": _on_cpu,
    "torch.testing._internal.distributed._shard.sharded_tensor": _shards_on_cpu,
    "torch.distributed.fsdp._init_utils": _fsdp_on_cpu,
})
if VARIANT:
    after_import({"torch.distributed.checkpoint": _ours})
"""

_CPU: Final = (
    (r"cpu:gloo,cuda:nccl|\bnccl\b", "gloo"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"\bcuda(:(\d|\{[^{}]*\}))?(?=[\"'])", "cpu"),
)


def _for_cpu(file: Path, logs: Path) -> Path:
    """Return a copy of a file of tests that uses no GPU."""
    source = file.read_text()
    for pattern, replacement in _CPU:
        source = re.sub(pattern, replacement, source)
    copy = logs / "tests" / file.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(source)
    return copy


if __name__ == "__main__":
    sys.exit(compare_files(__doc__, _HOOKS, _for_cpu))

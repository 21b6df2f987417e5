"""Training under torchrun that may lose any rank, agent or host at any time.

    elastic_training.py SAVE_DIR STEPS EVENTS KIND PACE [REMOTE KEY_FILE [METADATA]]

KIND is `fsdp` or `ddp`. Every rank computes the same batch, made from the number of the step, so that neither one or two ranks nor their change alters a bit.
EVENTS is a file to which all ranks append lines; PACE a file with the seconds between two steps, which may change during the run; METADATA the
address of a metadata service of AWS.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ciuic import SnapshotManager
from ciuic.training import BeforePreemption, MetadataService

EVERY_STEPS = 5
COLLECTIVE_SECONDS = 8.0
"""How long a rank waits for another one in a collective."""
GRACE_SECONDS = 15.0


class _Events:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def tell(self, *words: object) -> None:
        # One write: ranks of all hosts share the file.
        os.write(self._fd, f"{' '.join(map(str, words))}\n".encode())


def main(
    save_dir: str,
    steps: int,
    events_file: str,
    kind: str,
    pace: str,
    url: str = "",
    key: str = "",
    metadata: str = "",
) -> None:
    """Train to the last step, from wherever there is something to resume from."""
    torch.set_num_threads(1)
    events = _Events(events_file)
    world = int(os.environ.get("WORLD_SIZE", "0"))
    torch.manual_seed(1)
    plain = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.Dropout(0.1)
    )
    model: torch.nn.Module = plain
    if world:
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
        if kind == "fsdp":
            fully_shard(plain, mesh=init_device_mesh("cpu", (world,)))
        else:
            model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    clouds = [MetadataService("aws", metadata, 0.2)] if metadata else []
    manager = SnapshotManager(
        save_dir,
        every_steps=EVERY_STEPS,
        save_when=[BeforePreemption(grace_seconds=GRACE_SECONDS, clouds=clouds)],
        max_snapshots=4,
        remote={"url": url, "key_file": key} if url else None,
    )
    manager.register(model=model, optimizer=optimizer)
    resumed = manager.resume()
    rank = dist.get_rank() if world else 0
    first = (resumed.step or 0) if resumed else 0
    events.tell("began", rank, world, first)
    stored = not url
    for step in range(first, steps):
        time.sleep(float(Path(pace).read_text()))
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        events.tell("step", rank, world, step + 1)
        if not stored and all(remote.stored for remote in manager.remote_status()):
            # From now on the loss of a host can be survived.
            stored = True
            events.tell("stored", rank, world, step + 1)
    manager.close()
    hasher = hashlib.sha256()
    for parameter in plain.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            hasher.update(whole.detach().numpy().tobytes())
    events.tell("digest", rank, world, hasher.hexdigest())
    if world:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

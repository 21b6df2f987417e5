"""Training of `make rescue-fleet`, as a user writes one for torchrun; lines that begin with ``@`` are for the story.

    fleet_train.py SAVE_DIR STEPS SECONDS_A_STEP [REMOTE KEY_FILE]

Every rank computes the same batch, made from the number of the step: so neither ranks nor their number change a bit.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ciuic import SnapshotManager
from ciuic.training import BeforePreemption

EVERY_STEPS = 10
STORED_AT = 25
"""Step after which the ranks wait until the store has what they have saved; so the loss of a host comes after that."""
_WAIT_SECONDS = 100.0


def main(save_dir: str, steps: int, step_seconds: float, remote: tuple[str, ...]) -> None:
    """Train to the last step, from wherever there is something to resume from."""
    world = int(os.environ.get("WORLD_SIZE", "0"))
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128), torch.nn.Dropout(0.1)
    )
    if world:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = SnapshotManager(
        save_dir,
        every_steps=EVERY_STEPS,
        save_when=[BeforePreemption(grace_seconds=20)],
        max_snapshots=4,
        remote={"url": remote[0], "key_file": remote[1]} if remote else None,
    )
    manager.register(model=model, optimizer=optimizer)
    resumed = manager.resume()
    rank = dist.get_rank() if world else 0
    first = resumed.step if resumed else 0
    report(f"@began {rank} {world} {first}")
    for step in range(first, steps):
        time.sleep(step_seconds)
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        report(f"@step {rank} {world} {step + 1}")
        if remote and step + 1 == STORED_AT and manager.wait_remote(_WAIT_SECONDS):
            report(f"@stored {rank} {world} {step + 1}")
    manager.close()
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            hasher.update(whole.detach().numpy().tobytes())
    report(f"@digest {rank} {world} {hasher.hexdigest()}")
    if world:
        dist.destroy_process_group()


def report(line: str) -> None:
    """Tell the story something; one write, because ranks and agents share the pipe."""
    sys.stdout.flush()
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), tuple(sys.argv[4:]))

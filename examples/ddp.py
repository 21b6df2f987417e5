"""DistributedDataParallel that resumes by itself: run it, kill it, run it again.

    torchrun --nproc-per-node 2 examples/ddp.py [directory for snapshots]

Every rank creates a manager. Rank 0 writes; all ranks resume from the same snapshot, each with its own place in
the data and its own random generators.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ciuic import SnapshotManager

save_dir = sys.argv[1] if len(sys.argv) > 1 else "./snapshots"
dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.rand(80, 8)
dataset = TensorDataset(x, (x.sum(1) > 4).long())
sampler = DistributedSampler(dataset, shuffle=True, seed=1)  # its order depends on the epoch
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with SnapshotManager(save_dir, every_steps=4, max_snapshots=10) as manager:
    manager.register(model=parallel, optimizer=optimizer, loader=loader)
    resumed = manager.resume()
    for epoch in range(resumed.epoch if resumed else 0, 4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:  # continues after the last saved batch
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
        manager.save_snapshot(epoch=epoch)
if dist.get_rank() == 0:
    print("trained to step", manager.step)
dist.destroy_process_group()

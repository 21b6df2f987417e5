"""Training with torch that is signalled to end at a chosen point.

    python preempted_training.py SAVE_DIR RESULT TELL GRACE_SECONDS THEN

TELL names where it signals itself: `step:N` between backward and step of step N, `evaluation:E` within the
evaluation after epoch E, `never`. Two epochs of six steps with dropout, batch norm, a schedule of epochs and
an evaluation that draws. RESULT gets the digest.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from ciuic import SnapshotManager
from ciuic.training import BeforePreemption, Preempted


def main(save_dir: str, result: str, tell: str, grace_seconds: float, then: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = TensorDataset(torch.rand(24, 8, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3)
    loader = DataLoader(data, batch_size=4, shuffle=True)

    def called(preempted: Preempted) -> None:
        print(f"called {preempted.cause} {preempted.snapshot is not None}", flush=True)  # noqa: T201
        raise SystemExit(3)

    rule = BeforePreemption(
        grace_seconds,
        then=called if then == "call" else then,  # type: ignore[arg-type]
        exit_code=75 if then == "exit" else None,
    )
    manager = SnapshotManager(save_dir, save_when=[rule])
    manager.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    resumed = manager.resume()
    for epoch in range((resumed.epoch or 0) if resumed else 0, 2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if tell == f"step:{manager.step + 1}":
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for number in range(5):
                torch.rand(number)
                if tell == f"evaluation:{epoch}" and number == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                    # A bytecode at which the handler runs.
                    signal.getsignal(signal.SIGTERM)
                model(data.tensors[0])
        scheduler.step()
    digest = hashlib.sha256(repr((scheduler.state_dict(), torch.rand(2).tolist())).encode())
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    manager.close()
    with open(result, "w") as file:
        file.write(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])

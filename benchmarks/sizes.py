"""Disk space of successive checkpoints of a training: ten of a small transformer that is trained.

    python -m benchmarks.sizes [--compression auto|small|none] [--work adam|lora|mixed] [--out FILE.md]

*adam*: a byte-level language model of 1.9 million parameters on the standard library's sources, AdamW, every
parameter trained. *lora*: a frozen backbone of 7 million with low-rank adapters (LoRA, rank 2: 0.4 % of the
parameters) beside its feed-forward layers. *mixed*: like *adam*, with weights of bfloat16 and an optimizer
that keeps float32 masters, as for mixed precision. The growth of the packs is compared with ten times the
state; the stored states are loaded again and compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SNAPSHOTS = 10
BARS = {"adam": 0.75, "lora": 0.10, "mixed": None}
WIDTHS = {"adam": 192, "lora": 384, "mixed": 192}
STEPS = {"adam": 20, "lora": 5, "mixed": 20}
CONTEXT, BATCH, RANK = 64, 16, 2


class Size(NamedTuple):
    work: str
    raw_bytes: int
    """Total of all ten."""
    stored_bytes: int
    seconds: float
    """Time that the writer process needed for all."""
    loss: float

    @property
    def share(self) -> float:
        return self.stored_bytes / self.raw_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=__doc__)
    parser.add_argument("--compression", default="auto")
    parser.add_argument("--work", choices=list(BARS), action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = [measure(work, options.compression) for work in options.work or BARS]
    table = report(found, options.compression)
    print(table)
    if options.out:
        options.out.write_text(table)
        facts = [size._asdict() | {"share": size.share} for size in found]
        options.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def report(found: list[Size], compression: str) -> str:
    """Return the results as a page."""
    lines = [
        f"# Ten successive checkpoints, `compression={compression!r}`",
        "",
        "| work | steps apart | state | ten of it | stored | share | bar | writer, each | loss at the end |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in found:
        bar = BARS[size.work]
        ten, stored = size.raw_bytes / 1e6, size.stored_bytes / 1e6
        lines.append(
            f"| {size.work} | {STEPS[size.work]} | {ten / SNAPSHOTS:.1f} MB | {ten:.1f} MB | {stored:.1f} MB | **{size.share:.3f}** "
            f"| {'' if bar is None else f'{bar:.2f}'} | {size.seconds / SNAPSHOTS * 1e3:.0f} ms | {size.loss:.2f} |"
        )
    return "\n".join(lines) + "\n"


def measure(work: str, compression: str) -> Size:
    """Train, save, and compare what can be loaded."""
    import torch

    from ciuic import SnapshotManager

    torch.manual_seed(0)
    model = _model(torch, WIDTHS[work])
    if work == "lora":
        _adapt(torch, model)
    if work == "mixed":
        model.to(torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = WithMasters(torch, trained) if work == "mixed" else torch.optim.AdamW(trained, lr=3e-4)
    data = _data(torch)
    with tempfile.TemporaryDirectory() as place:
        manager = SnapshotManager(place, compression=compression, max_snapshots=SNAPSHOTS)
        loss, seconds = 0.0, 0.0
        for _ in range(SNAPSHOTS):
            for _ in range(STEPS[work]):
                loss = _step(torch, model, optimizer, data)
            save = manager.save_snapshot(model, optimizer)
            assert save is not None
            save.wait()
            seconds += manager.stats.last_write_seconds
        state = manager.load_latest_snapshot()
        assert state is not None
        _same(torch, state["model_state_dict"], model.state_dict())
        _same(torch, state["optimizer_state_dict"]["state"], optimizer.state_dict()["state"])
        _same(torch, state["optimizer_state_dict"].get("masters"), optimizer.state_dict().get("masters"))
        listed = manager.list_snapshots()
        manager.close()
        packs = sum(path.stat().st_size for path in Path(place, "packs").iterdir())
    assert len(listed) == SNAPSHOTS
    return Size(work, sum(line.size_bytes for line in listed), packs, seconds, loss)


class WithMasters:
    """Optimizer: AdamW on float32 copies of the weights, which are rounded from them after each step."""

    def __init__(self, torch: Any, weights: list[Any]) -> None:
        self._torch = torch
        self._weights = weights
        self._masters = [weight.detach().float() for weight in weights]
        self._adam = torch.optim.AdamW(self._masters, lr=3e-4)

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None

    def step(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.grad.float()
        self._adam.step()
        with self._torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {**self._adam.state_dict(), "masters": self._masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        for master, loaded in zip(self._masters, state["masters"], strict=True):
            master.data.copy_(loaded)


def _model(torch: Any, width: int) -> Any:
    nn = torch.nn

    class Model(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(256, width)
            self.places = nn.Embedding(CONTEXT, width)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(4)
            )
            self.out = nn.Linear(width, 256)

        def forward(self, x: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
            for layer in self.layers:
                hidden = layer(hidden, src_mask=mask, is_causal=True)
            return self.out(hidden)

    return Model()


def _adapt(torch: Any, model: Any) -> None:
    """Freeze the whole model, and put adapters beside the linear layers of each block."""
    nn = torch.nn

    class Adapted(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self, frozen: Any) -> None:
            super().__init__()
            self.frozen = frozen
            self.down = nn.Parameter(torch.randn(RANK, frozen.in_features) * 0.02)
            self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

        def forward(self, x: Any) -> Any:
            return self.frozen(x) + x @ self.down.T @ self.up.T

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.layers:
        layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)


def _data(torch: Any) -> Any:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]
    text = b"".join(source.read_bytes() for source in sources)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def _step(torch: Any, model: Any, optimizer: Any, data: Any) -> float:
    starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,)).tolist()
    x = torch.stack([data[at : at + CONTEXT] for at in starts])
    y = torch.stack([data[at + 1 : at + CONTEXT + 1] for at in starts])
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _same(torch: Any, found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            _same(torch, found[name], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for found_item, wanted_item in zip(found, wanted, strict=True):
            _same(torch, found_item, wanted_item)
    elif torch.is_tensor(wanted):
        assert torch.equal(found, wanted)


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")

"""Compression of real checkpoint data by kind, zstd level and block size; blocks that two checkpoints share.

`python -m benchmarks.store.packing`: trains a small network with numpy and Adam, takes its state at two steps
as a training run saves it (weights and both moments in float32, weights in bfloat16), writes a log, and
prints the tables of docs/decisions/compression.md and block-size.md. Times are processor time of one thread.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import xxhash
import zstandard

from benchmarks.store.tree import log_lines

_INPUTS, _HIDDEN, _OUTPUTS, _BATCH = 784, 2048, 1024, 64
_STEPS = (150, 160)
_LEVELS = (-5, -1, 1, 2, 3, 6)
_BLOCKS = tuple(1 << power for power in (16, 17, 18, 19, 20, 22))
_SAMPLE_BYTES = 4096
Adam = dict[str, dict[str, Any]]


def main() -> None:
    states = _train()
    data = states[-1]
    data["log"] = log_lines(1, 8 << 20)
    _compression(data)
    _block_sizes(data)
    _repeated(states)


def _train() -> list[dict[str, bytes]]:
    """Train, and return the saved bytes of each step in ``_STEPS``, by kind."""
    np: Any = importlib.import_module("numpy")
    generator = np.random.default_rng(1)
    shapes = ((_INPUTS, _HIDDEN), (_HIDDEN, _OUTPUTS))
    weights = [
        generator.standard_normal(shape, dtype=np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes
    ]
    first_moment = [np.zeros_like(weight) for weight in weights]
    second_moment = [np.zeros_like(weight) for weight in weights]
    teacher = generator.standard_normal((_INPUTS, _OUTPUTS), dtype=np.float32)
    saved = []
    for step in range(1, _STEPS[-1] + 1):
        inputs = generator.standard_normal((_BATCH, _INPUTS), dtype=np.float32)
        hidden = np.maximum(inputs @ weights[0], 0)
        error = (hidden @ weights[1] - np.tanh(inputs @ teacher)) / np.float32(_BATCH)
        gradients = [inputs.T @ ((error @ weights[1].T) * (hidden > 0)), hidden.T @ error]
        for weight, gradient, m, v in zip(weights, gradients, first_moment, second_moment, strict=True):
            m += np.float32(0.1) * (gradient - m)
            v += np.float32(0.001) * (gradient * gradient - v)
            weight -= np.float32(1e-3) * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        if step in _STEPS:
            saved.append(_as_saved(np, weights, first_moment, second_moment))
    return saved


def _as_saved(
    np: Any, weights: list[Any], first_moment: list[Any], second_moment: list[Any]
) -> dict[str, bytes]:
    fp32 = [
        np.concatenate([array.ravel() for array in arrays]).astype(np.float32)
        for arrays in (weights, first_moment, second_moment)
    ]
    bf16 = (fp32[0].view(np.uint32) >> 16).astype(np.uint16)
    return {
        "weights, bf16": bf16.tobytes(),
        "weights, fp32": fp32[0].tobytes(),
        "Adam, first moment": fp32[1].tobytes(),
        "Adam, second moment": fp32[2].tobytes(),
    }


def _blocks(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _compress(blocks: list[bytes], level: int) -> tuple[float, float]:
    """Return the compressed size as a share of the original, and the seconds of processor time."""
    compressor = zstandard.ZstdCompressor(level=level)
    begun = time.process_time()
    compressed_bytes = sum(len(compressor.compress(block)) for block in blocks)
    return compressed_bytes / sum(map(len, blocks)), time.process_time() - begun


def _compression(data: dict[str, bytes]) -> None:
    head = "".join(f" level {level} |" for level in _LEVELS)
    _print(f"| data | sample, level 1 |{head} unpack |", "| --- |" + " ---: |" * (len(_LEVELS) + 2))
    for kind, content in data.items():
        blocks = _blocks(content, 256 << 10)
        samples = [
            b"".join((b[:_SAMPLE_BYTES], b[len(b) // 2 :][:_SAMPLE_BYTES], b[-_SAMPLE_BYTES:]))
            for b in blocks
        ]
        cells = [f"{_compress(samples, 1)[0]:.2f}"]
        for level in _LEVELS:
            ratio, seconds = _compress(blocks, level)
            cells.append(f"{ratio:.3f}, {len(content) / 1e6 / max(seconds, 1e-6):.0f} MB/s")
        packed = [zstandard.ZstdCompressor(level=3).compress(block) for block in blocks]
        begun = time.process_time()
        for block in packed:
            zstandard.ZstdDecompressor().decompress(block)
        cells.append(f"{len(content) / 1e6 / (time.process_time() - begun):.0f} MB/s")
        _print(f"| {kind} | {' | '.join(cells)} |")


def _block_sizes(data: dict[str, bytes]) -> None:
    _print("", "| block | " + " | ".join(data) + " | hash |", "| ---: |" + " ---: |" * (len(data) + 1))
    for size in _BLOCKS:
        cells = [f"{_compress(_blocks(content, size), 1)[0]:.3f}" for content in data.values()]
        blocks = _blocks(data["weights, fp32"], size)
        begun = time.process_time()
        for block in blocks:
            xxhash.xxh3_128_digest(block, seed=1)
        speed = sum(map(len, blocks)) / 1e9 / (time.process_time() - begun)
        _print(f"| {size >> 10} KiB | {' | '.join(cells)} | {speed:.1f} GB/s |")


def _repeated(states: list[dict[str, bytes]]) -> None:
    """Print the share of blocks of the later checkpoint that the earlier one contains."""
    _print("", "| block | " + " | ".join(states[0]) + " |", "| ---: |" + " ---: |" * len(states[0]))
    for size in _BLOCKS:
        cells = []
        for kind in states[0]:
            earlier = set(_blocks(states[0][kind], size))
            blocks = _blocks(states[-1][kind], size)
            cells.append(f"{sum(block in earlier for block in blocks) / len(blocks):.3f}")
        _print(f"| {size >> 10} KiB | {' | '.join(cells)} |")


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

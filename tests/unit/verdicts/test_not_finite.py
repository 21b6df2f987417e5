"""Numbers that are not finite: counted exactly, within a budget, and not where a program means them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint_files import MemoryFile, plain_safetensors
from support.cli_repository import FIRST_NS, CliRepository

from ciuic.verdicts.model import Numbers
from ciuic.verdicts.not_finite import NumberBudget, count_not_finite
from ciuic.verdicts.verdict import judge_file

NAN, INF = float("nan"), float("inf")
_NUMBERS = st.lists(
    st.one_of(st.sampled_from([NAN, INF, -INF, 0.0, -0.0]), st.floats(width=16)), min_size=1, max_size=40
)


@pytest.mark.parametrize("kind", ["<f2", "<f4", "<f8", ">f4", "<c8", "bf16"])
@given(numbers=_NUMBERS, times=st.sampled_from([1, 3000]))
def test_every_number_is_counted(kind: str, numbers: list[float], times: int) -> None:
    """The count equals NumPy's for every kind and length, without a lone infinity or tensors whose infinities are all negative."""
    values = np.array(numbers * times, "<f4" if kind == "bf16" else kind)
    parts = values.view(values.real.dtype)
    odd = parts[~np.isfinite(parts)]
    is_meant = not np.isnan(odd).any() and (len(parts) == 1 or bool((odd < 0).all()))
    data, name = parts.tobytes(), {2: "F16", 4: "F32", 8: "F64"}[parts.itemsize]
    if kind == "bf16":
        data, name = parts.view("<u2")[1::2].tobytes(), "BF16"
        # A small NaN loses its mark with the lower half: NumPy makes none of these.
        assert not np.isnan(odd).any() or (parts.view("<u4")[np.isnan(parts)] & 0x400000).all()
    ranges = [Numbers(3, 3 + len(data), name, kind[0] == ">")]
    found = count_not_finite(MemoryFile(b"x", b"abc" + data).read, ranges, NumberBudget(1 << 30))
    assert found == (0 if is_meant else len(odd))


def test_numbers_of_eight_bits_are_counted() -> None:
    """E5M2 has infinities, E4M3 has NaN alone."""
    data = bytes(range(256))
    for kind, expected in (("F8_E5M2", 8), ("F8_E4M3", 2)):
        ranges = [Numbers(0, 256, kind)]
        assert count_not_finite(MemoryFile(b"x", data).read, ranges, NumberBudget(1 << 30)) == expected


def test_a_file_beyond_the_budget_is_unknown() -> None:
    """Numbers found in a part count; a part without any leaves the count unknown."""
    for odd_at, expected in ((0, 1), (99, None)):
        values = np.ones(100, "f4")
        values[odd_at] = NAN
        source = MemoryFile(b"a.safetensors", plain_safetensors({"w": values}))
        verdict = judge_file(source, budget=NumberBudget(200))
        assert (verdict.state, verdict.not_finite) == ("GOOD", expected)
        assert judge_file(source, budget=NumberBudget(1 << 30, 200)).not_finite == expected
        assert judge_file(source, budget=NumberBudget(400)).not_finite == 1
    assert judge_file(source).not_finite is None
    into = io.BytesIO()
    np.savez_compressed(into, w=values)
    assert judge_file(MemoryFile(b"a.npz", into.getvalue()), budget=NumberBudget(1 << 30)).not_finite is None


def _checkpoint(*numbers: float, time: int) -> tuple[bytes, dict[str, int]]:
    return plain_safetensors({"w": np.array(numbers, "f4")}), {"mtime_ns": FIRST_NS + time}


def test_restore_passes_over_what_is_not_finite(tmp_path: Path) -> None:
    """A checkpoint of NaN is GOOD with a mark; with --finite the one before is restored, and the other is named."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    first = {b"step-1.safetensors": _checkpoint(1, 2, time=1)}
    odd = {b"step-2.safetensors": _checkpoint(NAN, 2, time=2), b"mask.npy": (b"", {"mtime_ns": FIRST_NS})}
    made.snapshot(first, mode="tracked")
    made.snapshot({**first, **odd}, mode="tracked")
    listed = json.loads(made.run("checkpoints", "--json").stdout)["checkpoints"]
    assert {os.path.basename(one["path"]): one["not_finite"] for one in listed} == {
        "step-1.safetensors": 0,
        "step-2.safetensors": 1,
        "mask.npy": None,
    }
    assert "1 number is not finite" in made.run("checkpoints").stdout
    root = str(made.root)
    plain = made.run("restore", "--last-good", "-p", root, "--dry-run")
    assert "step-2.safetensors is GOOD" in plain.stderr
    assert "--finite passes over" in plain.stderr
    done = made.run("restore", "--last-good", "--finite", "-p", root, "--json")
    assert done.exit_code == 0, done.stderr
    (choice,) = json.loads(done.stdout)["last_good"]
    assert os.path.basename(choice["checkpoint"]) == "step-1.safetensors"
    assert "step-2.safetensors is GOOD: 1 number is not finite" in choice["passed_over"][0]["reason"]
    assert made.run("restore", "--finite", "-s", "latest", "-p", root).exit_code == 2


def test_of_one_snapshot_the_newest_finite_one_is_chosen(tmp_path: Path) -> None:
    """Where no snapshot ends with a finite one, the choice is the newest beside, and what it has beside it is told."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    tree = {
        b"step-%d.safetensors" % step: _checkpoint(1 if step < 2 else NAN, 2, time=step) for step in range(4)
    }
    made.snapshot(tree, mode="tracked")
    done = made.run("restore", "--last-good", "--finite", "-p", str(made.root), "--json", "--dry-run")
    assert done.exit_code == 0, done.stderr
    (choice,) = json.loads(done.stdout)["last_good"]
    assert os.path.basename(choice["checkpoint"]) == "step-1.safetensors"
    assert len(choice["not_good"]) == 2
    assert "not whole or not finite" in done.stderr

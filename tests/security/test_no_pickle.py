"""Attacker: a user who reaches the port of torch's store, or a connection between ranks.

Nothing received is executed.
"""

from __future__ import annotations

import ast
import collections
import math
import pickle  # noqa: TID251  the attacker's
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch
from support.rank_processes import Ranks as Processes

from ciuic.training import ranks
from ciuic.training.ranks import RankMismatch, Ranks
from ciuic.training.state.rank_state import RankState, differing

CHECKOUT = Path(__file__).parents[2]
_EXECUTING = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "multiprocessing",
    "code",
    "codeop",
}
_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "recv_object_list",
}


class Payload:
    """Payload that makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def first_rank(store: Any, directory: Path) -> Ranks:
    """Return rank 0 of two, connected to the other by the store and the directory alone."""
    made = Ranks(0, 2, None, None, "ciuic/run/1")
    made.directory = directory
    made._store = lambda prefix: torch.distributed.PrefixStore(prefix, store)  # type: ignore[method-assign]
    made.begin_asked(1, "train.py:7")
    return made


@pytest.mark.parametrize("payload", [b"", b"\x80", b"garbage", b"\x92\xc4\x02{}\x90", None])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_pickle_in_the_store_is_refused(tmp_path: Path, payload: bytes | None, in_file: bool) -> None:
    """Rank 0 refuses a pickle, or garbage, that an attacker put in the store or the file in the other rank's place."""
    mark = tmp_path / "mark"
    store, name = torch.distributed.HashStore(), f"ciuic/run/1/own/{('train.py:7', 1, 1)}"
    data = (
        pickle.dumps(RankState({"random": Payload(mark)}, digests={}, weights={}))
        if payload is None
        else payload
    )
    own = first_rank(store, tmp_path)
    if in_file:
        own._file_of(1).parent.mkdir(parents=True)
        own._file_of(1).write_bytes(data)
    torch.distributed.PrefixStore(name, store).set("1", b"file" if in_file else data)
    try:
        found = own.hand_in(RankState({}).message())
    except RankMismatch:
        pass
    else:
        with pytest.raises(ValueError, match="another rank"):
            RankState.of((found or [None])[-1])
    assert not mark.exists()


def test_values_stored_by_a_rank_arrive_unchanged(tmp_path: Path) -> None:
    """A value that a rank stores arrives unchanged, with tensors of every kind and tied ones tied."""
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    states = {
        "object position": {"at": 10**40, "rate": math.nan, "seen": {(1, 2): b"\x00"}, "order": collections.OrderedDict(a=1)},
        "random": {"torch": torch.get_rng_state(), "empty": torch.empty(0, 3)},
        "buffers": {"model": {"a": weight, "tied": weight, "whole": torch.tensor(3), "complex": torch.tensor([1j])}},
    }  # fmt: skip
    store = torch.distributed.HashStore()
    other = first_rank(store, tmp_path)
    other.rank = 1
    assert other.hand_in(RankState(states).message()) == []
    own, found = map(RankState.of, first_rank(store, tmp_path).hand_in(RankState(states).message()) or [])
    assert differing([own, found]) == {"1": {}}
    buffers = found.states["buffers"]["model"]
    assert torch.equal(buffers["a"], weight)
    assert buffers["a"].dtype is torch.bfloat16
    assert buffers["a"] is buffers["tied"]
    buffers["a"].zero_()
    assert weight.sum() == 15


@pytest.mark.parametrize(
    "tensor",
    [
        ["t", "F32", [2**62], b""], ["t", "F32", [-1], b"abcd"], ["t", "F32", [-1, -4], b"x" * 16], ["t", "O", [1], b"x" * 8],
        ["t", "F32", [1 << 200], b""], ["u", "F32", [1], b"abcd"], ["t", "F32", [1], b"abc"],
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "extra",
    [{}, {"dtype": "load"}, {"dtype": "float64", "shape": [7]}, {"of": "numpy", "dtype": "O", "shape": [1]}],
)
def test_tensors_that_cannot_be_are_refused(tensor: list[Any], extra: dict[str, Any]) -> None:
    """A tensor message with impossible sizes allocates nothing, and dtype names resolve to dtypes only."""
    import json

    import msgspec

    skeleton = json.dumps({"$": "tensor", "name": "t", **extra}).encode()
    shape = [min(size, 2**63) for size in tensor[2]]
    data = msgspec.msgpack.encode([skeleton, [[tensor[0], tensor[1], shape, tensor[3]]]])
    with pytest.raises(ValueError, match=r"."):
        ranks.decode(data)


def _exchange(rank: int, world: int, directory: str) -> None:
    from ciuic.training.ranks import Ranks

    ranks = Ranks.meet("run")
    assert ranks is not None
    assert ranks.find_directories(Path(directory))
    values = [{"rank": one, "tensor": torch.full((one * 1000 + 1,), one)} for one in range(world)]
    everybody = ranks.exchange(values[rank])
    assert [one["rank"] for one in everybody] == [*range(world)]
    assert all(
        torch.equal(one["tensor"], want["tensor"]) for one, want in zip(everybody, values, strict=True)
    )
    gathered = ranks.gather(values[rank])
    assert (gathered is None) == (rank > 0)
    assert gathered is None or [one["rank"] for one in gathered] == [*range(world)]
    assert ranks.tell(("told", [rank]) if rank == 0 else None) == ("told", [0])
    assert ranks.first_problem("broken" if rank == 1 else "") == "rank 1: broken"
    ranks.close()


@pytest.mark.full
def test_real_ranks_understand_one_another(tmp_path: Path) -> None:
    """Ranks over gloo process groups exchange messages of different lengths."""
    Processes(tmp_path / "ranks", 3, _exchange, str(tmp_path)).check()


def _is_plain(call: ast.Call) -> bool:
    """Return whether a call of torch.load says `weights_only=True` itself."""
    return any(
        keyword.arg == "weights_only"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )


def test_no_module_of_the_product_can_execute_its_input() -> None:
    """Modules of the product use no pickle or its kin, eval, exec, compile, or collectives that unpickle.

    torch.load is called with a literal ``weights_only=True`` alone.
    """
    wrong = []
    # At the top, fuse_layer, daemon and cli are links to folders of the package.
    for package in ("ciuic",):
        for path in sorted((CHECKOUT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                called = node.func if isinstance(node, ast.Call) else None
                wrong += [f"{path}: imports {name}" for name in names if name.partition(".")[0] in _EXECUTING]
                if isinstance(called, ast.Name) and called.id in ("eval", "exec", "compile", "__import__"):
                    wrong.append(f"{path}:{called.lineno}: {called.id}")
                if isinstance(called, ast.Attribute):
                    of_torch = isinstance(called.value, ast.Name) and called.value.id == "torch"
                    if called.attr in _COLLECTIVES or (
                        called.attr == "load" and of_torch and not _is_plain(node)
                    ):
                        wrong.append(f"{path}:{called.lineno}: {called.attr}")
    assert wrong == []

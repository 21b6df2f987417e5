"""Verdicts on directories: index or marker, and every file that it names, perhaps by a symbolic link."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint_files import FORMATS, MemoryDirectory
from support.cli_repository import CliRepository
from support.trainer_directories import WHOLE, link, metadata

from ciuic.history import checkpoints, judge_snapshot, timelines
from ciuic.repository import Repository
from ciuic.verdicts.formats.tensor_bundle import crc32c
from ciuic.verdicts.model import Checkpoint
from ciuic.verdicts.verdict import FileVerdicts, checkpoints_in

PICKLE = FORMATS["pickle"].make(random.Random(1))


def only(tree: dict[bytes, Any], path: bytes = b"/d", **kwargs: Any) -> Checkpoint:
    (found,) = checkpoints_in(MemoryDirectory(tree, path, **kwargs))
    return found


def sharded() -> dict[bytes, Any]:
    index = {
        "metadata": {},
        "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"},
    }
    return {
        b"m-1.safetensors": WHOLE,
        b"m-2.safetensors": WHOLE,
        b"m.safetensors.index.json": json.dumps(index).encode(),
    }


def test_sharded_weights_need_every_shard() -> None:
    """An index with all its shards is GOOD; with one missing or cut it is TORN and names the shard."""
    tree = sharded()
    assert only(tree).verdict.is_good
    cut = only(tree | {b"m-2.safetensors": WHOLE[:-1]}).verdict
    assert (cut.state, cut.reason.partition(":")[0]) == ("TORN", "m-2.safetensors")
    del tree[b"m-2.safetensors"]
    assert only(tree).verdict[:2] == ("TORN", "m-2.safetensors is missing")


def test_an_open_shard_or_index_makes_sharded_weights_unknown() -> None:
    """A shard that a program had open makes the whole UNKNOWN, and so does an open index."""
    for name in sharded():
        assert only(sharded(), open_files=frozenset({name})).verdict.state == "UNKNOWN", name


@pytest.mark.parametrize(
    "index", [b"{", b"\0" * 90, b'{"weight_map": {}}', b'{"weight_map": {"a": "../../etc/passwd"}}']
)
def test_a_damaged_index_is_torn_and_leads_nowhere(index: bytes) -> None:
    """An index that is cut, empty, or names a path outside of the directory is TORN."""
    found = checkpoints_in(MemoryDirectory(sharded() | {b"m.safetensors.index.json": index}))
    assert "TORN" in {one.verdict.state for one in found}


def test_a_directory_of_one_step_is_one_checkpoint() -> None:
    """The files in checkpoint-500 are one checkpoint with the worst of their verdicts; elsewhere each stands alone."""
    tree = {b"model.safetensors": WHOLE, b"optimizer.pkl": PICKLE, b"trainer_state.json": b"{}"}
    assert only(tree, b"/runs/checkpoint-500").verdict.is_good
    torn = only(tree | {b"optimizer.pkl": PICKLE[:-1]}, b"/runs/checkpoint-500")
    assert (torn.path, torn.verdict.state) == (b"/runs/checkpoint-500", "TORN")
    assert {one.path for one in checkpoints_in(MemoryDirectory(tree))} == {
        b"/d/model.safetensors",
        b"/d/optimizer.pkl",
    }


def deepspeed(ranks: int) -> dict[bytes, Any]:
    below = {b"mp_rank_00_model_states.pt": PICKLE}
    for rank in range(ranks):
        below[b"bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt" % rank] = PICKLE
    return {b"latest": b"global_step5", b"global_step5": below}


def test_deepspeed_needs_all_ranks_of_the_latest_step() -> None:
    """`latest` leads to a directory with the states of every rank; a missing rank or directory is TORN."""
    tree = deepspeed(3)
    assert only(tree).verdict.is_good
    del tree[b"global_step5"][b"bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    assert only(tree).verdict[:2] == ("TORN", "the states of 1 rank are missing")
    assert only({b"latest": b"global_step6"}).verdict.state == "TORN"
    assert not checkpoints_in(MemoryDirectory({b"latest": b"a file with\nother content"}))


@pytest.mark.parametrize(
    "latest",
    [
        *(b"step-400.safetensors", b"400", b"runs", b"absent", b"", b"\0\0\0\0", b"../x", b"/abs/step-400"),
        b"a file with\nother content",
        {b"model.txt": b"x"},
        {},
        None,
    ],
)
def test_a_latest_of_another_program_is_no_checkpoint(latest: Any) -> None:
    """A file, a directory, or a link of this name takes no part in the verdict on what lies beside it."""
    tree = {b"latest": latest, b"step-400.safetensors": WHOLE, b"runs": {b"log": b"x"}}
    assert only(tree).path == b"/d/step-400.safetensors"
    assert only(tree).verdict.is_good


@pytest.mark.parametrize("latest", [b"", b"\0\0\0\0", b"absent", b"global_step6"])
def test_a_latest_beside_what_deepspeed_writes_is_its_own(latest: bytes) -> None:
    """A `latest` that names nothing is TORN beside states of ranks or the script that DeepSpeed copies."""
    for beside in (deepspeed(2), {b"zero_to_fp32.py": b"#!/usr/bin/env python"}):
        assert only(beside | {b"latest": latest}).verdict.state == "TORN"


def test_a_hostile_number_of_ranks_costs_nothing() -> None:
    """A rank number in the name of a file does not decide how much is computed."""
    tree = deepspeed(1)
    tree[b"global_step5"][b"zero_pp_rank_999999_mp_rank_999999_optim_states.pt"] = PICKLE
    assert only(tree).verdict.state == "TORN"


def test_dcp_needs_its_metadata_and_the_bytes_that_it_names() -> None:
    """Without .metadata a DCP directory is TORN, and so it is where a data file is shorter than .metadata says."""
    data = bytes(range(1, 251))
    tree = {b".metadata": metadata(b"__0_0.distcp", 100, 150), b"__0_0.distcp": data}
    assert only(tree).verdict.is_good
    assert only(tree | {b"__0_0.distcp": data[:-1]}).verdict.state == "TORN"
    assert only(tree | {b"__0_0.distcp": data[:-50] + bytes(50)}).verdict.state == "UNKNOWN"
    assert only(tree | {b".metadata": tree[b".metadata"][:-1]}).verdict.state == "TORN"
    del tree[b".metadata"]
    assert only(tree).verdict.state == "TORN"


def orbax() -> dict[bytes, Any]:
    body = bytes.fromhex("0cdb3a2a") + (40).to_bytes(8, "little") + bytes(24)
    manifest = body + crc32c(body).to_bytes(4, "little")
    marker = json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}).encode()
    return {
        b"_CHECKPOINT_METADATA": marker,
        b"default": {b"manifest.ocdbt": manifest, b"d": {b"0a1b": b"data"}},
    }


def test_orbax_needs_its_marker_and_manifest() -> None:
    """A finished Orbax directory is GOOD; without the commit's time, with a cut manifest or a temporary name it is TORN."""
    assert only(orbax()).verdict.is_good
    assert only(orbax() | {b"_CHECKPOINT_METADATA": b'{"init_timestamp_nsecs": 1}'}).verdict.state == "TORN"
    assert only(orbax(), b"/run/5.orbax-checkpoint-tmp-17").verdict.state == "TORN"
    for data in (b"", bytes(40), orbax()[b"default"][b"manifest.ocdbt"][:-1] + b"x"):
        tree = orbax()
        tree[b"default"][b"manifest.ocdbt"] = data
        assert only(tree).verdict.state == "TORN", data


def test_tensorflow_data_without_an_index_are_torn() -> None:
    """The index of a TensorFlow checkpoint is written last: data alone, or a cut index, are TORN."""
    data = {b"ck-1.data-00000-of-00001": b"data"}
    assert only(data).verdict.state == "TORN"
    assert only(data | {b"ck-1.index": bytes(200)}).verdict.state == "TORN"


def test_a_checkpoint_of_tensorflow_needs_index_and_data() -> None:
    """With an index that TensorFlow wrote, data of the length in it are GOOD; a flipped index or shorter data are TORN."""
    index = (Path(__file__).parent / "tensorflow-ck-1.index").read_bytes()
    data = random.Random(1).randbytes(4267)
    tree = {b"ck-1.index": index, b"ck-1.data-00000-of-00001": data}
    assert only(tree).verdict.is_good
    assert only(tree | {b"ck-1.data-00000-of-00001": data[:-1]}).verdict.state == "TORN"
    # The block of the tensors and its checksum; behind them are places of other blocks and padding.
    for at in range(0, 219, 7):
        flipped = index[:at] + bytes([index[at] ^ 1]) + index[at + 1 :]
        assert not only(tree | {b"ck-1.index": flipped}).verdict.is_good, at


def test_crc32c_has_the_known_value() -> None:
    """The checksum of the digits is that of RFC 3720."""
    assert crc32c(b"123456789") == 0xE3069283


INDEX = b'{"weight_map": {"a": "a.safetensors"}}'


def hub(target: str, blob: bytes = WHOLE) -> dict[bytes, Any]:
    return {
        b"snapshots": {b"1": {b"m.safetensors.index.json": INDEX, b"a.safetensors": link(target)}},
        b"blobs": {b"x": blob},
        b"by": link("blobs"),
        b"round": link("round"),
    }


@pytest.mark.parametrize(
    ("target", "state", "reason"),
    [
        ("../../blobs/x", "GOOD", "1 file"),
        ("../../by/x", "GOOD", "1 file"),
        ("ROOT/by/../by/x", "GOOD", "1 file"),
        ("../../blobs/absent", "TORN", "a.safetensors is missing"),
        ("../../../../../../x", "UNKNOWN", "a.safetensors is a link that leads out"),
        ("../../round", "UNKNOWN", "a.safetensors is a link that leads out"),
    ],
)
def test_a_link_is_followed_within_the_root(tmp_path: Path, target: str, state: str, reason: str) -> None:
    """A part that is a link counts where it leads in the root; one that leads out or in a circle proves nothing."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot(hub(target.replace("ROOT", str(made.root))), mode="tracked")
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        (timeline,) = timelines(snapshots)
        (found,) = checkpoints(repository, timeline, snapshots[0])
    assert found.checkpoint.verdict.state == state
    assert found.checkpoint.verdict.reason.startswith(reason)


def test_a_stored_verdict_is_not_taken_where_the_linked_file_is_another(tmp_path: Path) -> None:
    """A directory of links that is the same in two snapshots is judged again: what they lead to may differ."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot(hub("../../blobs/x"), mode="tracked")
    made.snapshot(hub("../../blobs/x", WHOLE[:-1]), mode="tracked")
    with Repository.open(made.path) as repository:
        snapshots, _ = repository.snapshots.load_all()
        before = judge_snapshot(repository, snapshots, snapshots[1], FileVerdicts())
        now = judge_snapshot(
            repository, snapshots, snapshots[0], FileVerdicts(), {before.snapshot: before}.get
        )
    states = [
        one.checkpoint.verdict.state for record in (before, now) for _, some in record.roots for one in some
    ]
    assert states == ["GOOD", "TORN"]

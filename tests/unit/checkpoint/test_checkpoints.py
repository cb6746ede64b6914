"""What decides about checkpoints, and their files: every damaged byte is found."""

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from adloco_dist.checkpoint.files import BLOCK_BYTES, StagingBuffer, number_in, obsolete, prune
from adloco_dist.checkpoint.resume import check_resumed
from adloco_dist.config import CheckpointSettings, Placement, SettingsError
from adloco_dist.data.indexed import ShardCursor
from adloco_dist.policy.budget import is_checkpoint_due
from adloco_dist.policy.layout import Layout, place_again
from adloco_dist.policy.plan import CheckpointId
from adloco_dist.run.manifest import (
    MANIFEST_FILE,
    DamagedError,
    Part,
    check_part,
    digest_of,
    read_manifest,
    write_content,
    write_manifest,
)
from helpers.tables import advance, deal


def test_a_checkpoint_is_due_when_its_interval_is_over() -> None:
    last = CheckpointId(4, rounds=10, tokens=1000, seconds=60.0)
    only_rounds = CheckpointSettings(every="5rounds")
    assert not is_checkpoint_due(only_rounds, last, CheckpointId(0, 14, 9999, 9999.0))
    assert is_checkpoint_due(only_rounds, last, CheckpointId(0, 15, 1001, 61.0))
    assert is_checkpoint_due(CheckpointSettings(every="1e2tokens"), last, CheckpointId(0, 11, 1100, 61.0))
    minutes = CheckpointSettings(every="0.5minutes")
    assert [is_checkpoint_due(minutes, last, CheckpointId(0, 11, 1001, now)) for now in (89.0, 90.0)] == [False, True]
    never = CheckpointSettings(every=None)
    assert not is_checkpoint_due(never, last, CheckpointId(0, 9999, 10**9, 1e9))


def test_the_last_and_every_nth_are_kept() -> None:
    names = [CheckpointId(number, rounds=2 * number).name for number in range(1, 8)]
    assert obsolete(CheckpointSettings(keep_last=2), names) == names[:5]
    kept = CheckpointSettings(keep_last=1, keep_every_rounds=4)
    assert obsolete(kept, names) == [names[0], names[2], names[4]], "after rounds 4, 8 and 12 for ever"
    assert obsolete(CheckpointSettings(keep_last=9), names) == []
    assert number_in("000012-round-7") == 12
    assert number_in(".000012-round-7") is number_in("000012-round-7.archived-1") is None


def test_what_may_change_when_a_run_goes_on() -> None:
    saved = {
        "inner.lr": 1e-3,
        "model.hidden": 8,
        "outer.momentum": 0.9,
        "outer.average_span": 0.3,
        "run.root": "a",
        "cluster.device": "cpu",
    }
    assert check_resumed("x", saved, dict(saved)) == []
    assert check_resumed("x", saved, {**saved, "run.root": "b"}) == []
    assert check_resumed("x", saved, {**saved, "inner.lr": 1e-4}) == ["resumes with inner.lr=0.0001 instead of 0.001"]
    assert len(check_resumed("x", saved, {**saved, "outer.momentum": 0.8})) == 1
    moved = {"data.train": ["a/*.txt"], "data.streaming": False, "data.hub": "a/b:en@1", "model.warm_start": "there"}
    for key, value in (("data.train", ["b/*.txt"]), ("model.warm_start", "here"), ("data.hub", "a/b:en@2")):
        (remark,) = check_resumed("x", moved, {**moved, key: value})
        assert remark.startswith(
            f"resumes with {key}={value} instead of {moved[key]}; what lies there must be the same"
        )
    streamed = {**moved, "data.streaming": True}
    for before, changed in (
        (streamed, {"data.hub": "a/b:en@2"}),
        (streamed, {"data.hub": "a/b:de@1"}),
        (moved, {"model.warm_start": None}),
    ):
        with pytest.raises(SettingsError, match="was trained with"):
            check_resumed("x", before, {**before, **changed})
    for key, value in (("model.hidden", 16), ("outer.momentum", 0.0), ("outer.average_span", None)):
        with pytest.raises(SettingsError, match=rf"^{key}={value}: the run in x was trained with {key}={saved[key]}"):
            check_resumed("x", saved, {**saved, key: value})


@pytest.mark.parametrize("placement", list(Placement))
def test_workers_of_trainers_of_any_size_are_dealt_evenly(placement: Placement) -> None:
    rng = random.Random(0)
    for _ in range(300):
        nodes = sorted(rng.choices(range(rng.randint(1, 4)), k=rng.randint(1, 9)))
        before = Layout.one_rank_per_worker(
            {3 * trainer: tuple([0] * rng.randint(1, 12)) for trainer in range(rng.randint(1, 5))}
        )
        after = place_again(before, nodes, placement)
        assert {trainer: after.num_workers(trainer) for trainer in after.trainers} == {
            trainer: before.num_workers(trainer) for trainer in before.trainers
        }
        everyone = [rank for workers in after.workers.values() for ranks in workers for rank in ranks]
        loads = [everyone.count(rank) for rank in range(len(nodes))]
        assert max(loads) - min(loads) <= 1
        for workers in after.workers.values():
            assert len(set(workers)) == min(len(workers), len(nodes)), "on distinct ranks as long as there are enough"


def test_spread_goes_round_the_nodes_first() -> None:
    two = Layout.one_rank_per_worker({0: (0, 0), 1: (0, 0)})
    assert place_again(two, [0, 0, 1, 1], Placement.spread) == Layout.one_rank_per_worker({0: (0, 2), 1: (1, 3)})
    assert place_again(two, [0, 0, 1, 1], Placement.pack) == Layout.one_rank_per_worker({0: (0, 1), 1: (2, 3)})


def test_a_shard_is_restored_through_any_merges() -> None:
    rng = random.Random(1)
    for _ in range(50):
        dealt = dict(enumerate(deal(97, 5, seed=3)))
        shards = dict(enumerate(deal(97, 5, seed=3)))
        for _ in range(12):
            advance(shards[rng.choice(list(shards))], rng.randint(0, 60))
            if len(shards) > 1 and rng.random() < 0.3:
                survivor, *ended = sorted(rng.sample(sorted(shards), 2), key=lambda _: rng.random())
                shards[survivor] = shards[survivor].unite([shards[member] for member in ended])
                if rng.random() < 0.5:  # read, so that its ids are put together
                    shards[survivor].peek(0, 3)
                for member in ended:
                    del shards[member]
        for shard in shards.values():
            twin = ShardCursor.restore(json.loads(json.dumps(shard.state_dict())), dealt)
            assert twin.size == shard.size
            assert twin.num_unread == shard.num_unread
            for _ in range(2):
                np.testing.assert_array_equal(twin.peek(0, 150), shard.peek(0, 150))
                advance(twin, 111)
                advance(shard, 111)
            assert twin.state_dict() == shard.state_dict()


def filled(tensors: dict[str, torch.Tensor]) -> StagingBuffer:
    image = StagingBuffer()
    image.fill(tensors)
    return image


def written(folder: Path) -> dict[str, Part]:
    parts = {
        "state.json": write_content(folder / "state.json", b'{"round": 3}'),
        "trainer-0.safetensors": filled({"anchor": torch.arange(9.0)}).write(folder / "trainer-0.safetensors"),
    }
    write_manifest(folder, parts)
    return parts


def test_every_byte_of_a_checkpoint_is_watched(tmp_path: Path) -> None:
    folder = tmp_path / "000001-round-1"
    parts = written(folder)
    assert dict(read_manifest(folder)) == parts
    for path in folder.iterdir():
        content = path.read_bytes()
        others = [content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in range(len(content))]
        for damaged in [*others, content + b" ", content[:-1], b""]:
            path.write_bytes(damaged)
            with pytest.raises(DamagedError, match=path.name.replace(".", r"\.")):
                read_manifest(folder) if path.name == MANIFEST_FILE else check_part(folder, path.name, parts[path.name])
        path.unlink()
        with pytest.raises(DamagedError, match=path.name):
            read_manifest(folder) if path.name == MANIFEST_FILE else check_part(folder, path.name, parts[path.name])
        path.write_bytes(content)
    assert dict(read_manifest(folder)) == parts


def test_pruning_keeps_what_is_being_written(tmp_path: Path) -> None:
    for number in (1, 3, 4, 6):
        written(tmp_path / CheckpointId(number, rounds=number).name)
    for number in (2, 7):  # the earlier was never completed, the later is being written
        (tmp_path / CheckpointId(number, rounds=number).name).mkdir()
    (tmp_path / "somebody else's").mkdir()
    prune(tmp_path, CheckpointSettings(keep_last=2))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*(CheckpointId(number, rounds=number).name for number in (4, 6, 7)), "somebody else's"}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    written(tmp_path / "a")
    before = (tmp_path / "a" / "trainer-0.safetensors").read_bytes()
    (tmp_path / "a" / "blocked").mkdir()
    with pytest.raises(OSError):
        write_content(tmp_path / "a" / "blocked", b"x")
    with pytest.raises(OSError):
        filled({"anchor": torch.zeros(3)}).write(tmp_path / "a" / "state.json" / "under a file")
    assert (tmp_path / "a" / "trainer-0.safetensors").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "blocked", "manifest.json", "state.json", "trainer-0.safetensors",
    ]  # fmt: skip


def test_an_image_is_the_file_that_safetensors_reads(tmp_path: Path) -> None:
    image, path = StagingBuffer(), tmp_path / "part"
    for number, size in enumerate((5, 3 * BLOCK_BYTES, 1000, *range(BLOCK_BYTES // 4 - 140, BLOCK_BYTES // 4))):
        tensors = {
            "halves": torch.arange(3).bfloat16(),
            "step": torch.tensor(float(number)),
            "vector": torch.randn(size),
            "columns": torch.randn(4, 6).T,
            "updates": torch.tensor(number),
        }
        image.fill(tensors)
        part = image.write(path)
        assert part == digest_of(path)
        read = load_file(path)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)


def test_a_disk_that_is_full_in_the_middle_of_a_block(tmp_path: Path) -> None:
    """The system shortens the write, which the rest then no longer fits past the cache."""
    image = filled({"vector": torch.randn(5 * BLOCK_BYTES)})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 1000, unlimited[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            image.write(tmp_path / "part")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(tmp_path.iterdir()) == []
    assert image.write(tmp_path / "part") == digest_of(tmp_path / "part")

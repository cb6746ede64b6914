"""Wire sets of `datasets` as own streams: a resumed run reads what one reads that never stops."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import IterableDataset, config
from datasets.distributed import split_dataset_by_node

from adloco_dist.config import SettingsError, Shards
from adloco_dist.data.items import ItemBatch
from adloco_dist.data.own import own_splits
from adloco_dist.data.protocols import Batch
from helpers.reading import read_round, states_of

pytestmark = pytest.mark.stranger
FILES, ROWS = 4, 10
datasets.logging.set_verbosity_error()
config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else the hub is waited for


def json_lines(folder: Path) -> IterableDataset:
    paths = [folder / f"{number}.jsonl" for number in range(FILES)]
    for number, path in enumerate(paths):
        if not path.exists():
            path.write_text("".join(json.dumps({"n": number * ROWS + row}) + "\n" for row in range(ROWS)))
    return datasets.load_dataset("json", data_files=list(map(str, paths)), split="train", streaming=True)


def generated(folder: Path) -> IterableDataset:
    def rows(shards: list[int]) -> Any:
        yield from ({"n": shard * ROWS + row} for shard in shards for row in range(ROWS))

    return IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(FILES))})


def table(folder: Path) -> IterableDataset:
    return datasets.Dataset.from_dict({"n": list(range(FILES * ROWS))}).to_iterable_dataset(num_shards=FILES)


def doubled(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"n": [number for number in rows["n"] for _ in range(2)]}


MADE: dict[str, Callable[[IterableDataset], IterableDataset]] = {
    "as it is": lambda rows: rows,
    "shuffled": lambda rows: rows.shuffle(seed=3, buffer_size=8),
    "shuffled as a whole": lambda rows: rows.shuffle(seed=3, buffer_size=1000),
    "shuffled, then mapped": lambda rows: rows.shuffle(seed=3, buffer_size=8).map(lambda row: {"x": row["n"]}),
    "mapped, then shuffled": lambda rows: rows.map(lambda row: {"x": row["n"]}).shuffle(seed=3, buffer_size=5),
    "shards shuffled": lambda rows: rows.shuffle(seed=3, buffer_size=1),
    "mapped in batches": lambda rows: rows.map(doubled, batched=True, batch_size=7, remove_columns=["n"]),
    "filtered": lambda rows: rows.filter(lambda row: row["n"] % 3 > 0),
    "as tensors": lambda rows: rows.with_format("torch"),
    "a piece": lambda rows: rows.skip(3).take(31),
    "interleaved": lambda rows: datasets.interleave_datasets([rows, rows.map(lambda row: {"n": row["n"] + 100})]),
    "interleaved at random": lambda rows: datasets.interleave_datasets(
        [rows, rows.map(lambda row: {"n": row["n"] + 100}).shuffle(seed=1, buffer_size=4)], [0.3, 0.7], seed=1
    ),
}


def numbers(taken: Mapping[tuple[int, int], list[Batch]]) -> list[list[int]]:
    """What is in each batch."""
    batches = [batch for one in taken.values() for batch in one if isinstance(batch, ItemBatch)]
    return [[int(item["n"]) for item in batch.items] for batch in batches]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("source", [json_lines, generated, table])
def test_a_run_resumes_exactly_at_any_round_and_more_than_once(
    source: Callable[[Path], IterableDataset], made: str, tmp_path: Path
) -> None:
    """Rounds of 4 sequences end in the middle of files and of batches, at the end of a pass, and beyond it."""

    def stream(index: int, count: int) -> IterableDataset:
        return split_dataset_by_node(MADE[made](source(tmp_path)), rank=index, world_size=count)

    def load() -> Any:
        return stream, [{"n": 0}]

    undisturbed = dict(enumerate(own_splits(load).train.deal(1, 2, Shards.disjoint, seed=0)))
    resumed = undisturbed
    for round_ in range(16):
        if round_ % 3 == 1:  # in another process, from what a checkpoint of the last one holds
            resumed = dict(own_splits(load).train.restore(states_of(resumed), 1, Shards.disjoint, seed=0))
        expected = numbers(read_round(undisturbed, {0: 2}, 2, {0: 2}))
        if resumed is not undisturbed:
            assert numbers(read_round(resumed, {0: 2}, 2, {0: 2})) == expected, f"round {round_}"


def test_a_set_that_is_shuffled_without_a_seed_is_refused(tmp_path: Path) -> None:
    def load() -> Any:
        return lambda index, count: json_lines(tmp_path).shuffle(), [{"n": 0}]

    with pytest.raises(SettingsError, match=r"begins with other sequences .*; seed whatever it"):
        own_splits(load)

"""What data costs: tokens per second to ready batches, and what training waits for them.

The corpus is the standard library's sources, as text files, as C4-format gzip shards and as token files, with a BPE
tokenizer learnt from it. Streams against token files are timed pair by pair on two ranks that keep both cores busy.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.data.encoding import train_tokenizer
from adloco_dist.data.text_files import library_sources
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.round.inner import InnerPhase
from adloco_dist.setup.placement import set_up_pool
from common import interleave, median_ratio, parse, report, spread
from helpers.processes import run_ranks

ROOT = Path(__file__).parent.parent
SHARDS, VOCABULARY, TOKENIZER_FILES = 8, 4096, 150
BATCH, UPDATES = 4, 20
SHARED = ("model=tiny", "algorithm=localsgd", "batching.request=none", "merge=none", "inner.schedule=constant")


def write_corpora(folder: Path) -> None:
    """Text files are there already; shards of JSON lines, a tokenizer, token files."""
    sources = library_sources()
    train_tokenizer((path.read_bytes() for path in sources[:TOKENIZER_FILES]), VOCABULARY).save_pretrained(
        folder / "bpe"
    )
    for shard in range(SHARDS):
        with gzip.open(folder / f"shard-{shard}.json.gz", "wt", encoding="utf-8") as file:
            for path in sources[shard::SHARDS]:
                file.write(json.dumps({"text": path.read_text(errors="replace")}) + "\n")
    for number, path in enumerate(sources[:: len(sources) // 100]):
        (folder / f"{number:03}.txt").write_bytes(path.read_bytes())
    corpus = ["data=json", f"data.train=[{folder}/shard-*.json.gz]", f"data.tokenizer={folder}/bpe"]
    command = [sys.executable, str(ROOT / "launch" / "tokenize_corpus.py"), str(folder / "tokens"), *corpus]
    subprocess.run([*command, "--processes", "2"], check=True, capture_output=True)


def corpora(folder: Path) -> dict[str, list[str]]:
    bpe = f"data.tokenizer={folder}/bpe"
    validation = ["data.validation_documents=5", f"data.validation=[{folder}/shard-0.json.gz]"]
    return {
        "token file": ["data=tokens", f"data.train=[{folder}/tokens/train]"],
        "text, bytes": ["data=text", f"data.train=[{folder}/*.txt]"],
        "text, BPE": ["data=text", f"data.train=[{folder}/*.txt]", bpe],
        "gzip, streamed": [
            "data=json",
            f"data.train=[{folder}/shard-*.json.gz]",
            *validation,
            "data.streaming=true",
            bpe,
        ],
    }


def tokens_per_second(overrides: Sequence[str], num_workers: int, num_updates: int) -> float:
    """Batches of `num_workers` at once, each in a thread of its own; text is read and tokenised on the way."""
    data = compose([*SHARED, *overrides]).data
    start = time.perf_counter()
    splits = load_corpus(data)
    if data.streaming or data.corpus.name == "tokens":  # what is begun at once has no load time to speak of
        start = time.perf_counter()
    (cursor,) = splits.train.deal(1, num_workers, data.shards, 0)

    taken = [num_updates] * num_workers

    def read(worker: int) -> int:
        batches = (cursor.batch(worker, update, BATCH, taken) for update in range(num_updates))
        return sum(cast(TokenBatch, batch).total_targets for batch in batches)

    with ThreadPoolExecutor(num_workers) as pool:
        read_tokens = sum(pool.map(read, range(num_workers)))
    seconds = time.perf_counter() - start
    if data.streaming or data.corpus.name == "tokens":
        return read_tokens / seconds
    assert splits.table is not None
    return splits.table.num_tokens / seconds


def train_both_ways(runtime: Runtime, folder: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the inner phase on this rank, from a token file and from a stream, in turn on all ranks together."""
    torch.set_num_threads(1)
    settings = {name: _settings(overrides) for name, overrides in corpora(Path(folder)).items() if "text" not in name}
    sides = [_inner_phase(runtime, one, load_corpus(one.data)) for one in settings.values()]
    seconds = interleave(sides, rounds)
    return dict(zip(settings, seconds, strict=True))


def _settings(overrides: Sequence[str]) -> Settings:
    size = [f"algorithm.updates_per_round={UPDATES}", f"batching.local_batch={BATCH}", "batching.capacity=64"]
    return compose(
        [*SHARED, *overrides, *size, "pool.trainers=2", "pool.workers_per_trainer=1", "cluster.threads_per_rank=1"]
    )


def _inner_phase(runtime: Runtime, settings: Settings, splits: TextSplits) -> Callable[[], None]:
    layout = experiment_layout(settings, runtime.nodes)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    pool = set_up_pool(settings, runtime, splits, objective, module, layout)
    first = plan_round(settings, PlanInputs(layout), None, PoolReport())
    rounds = iter(range(1 << 20))

    def run() -> None:
        runtime.control.exchange({})  # both cores have the same to do at the same time
        plan = replace(first, updates=UPDATES, round=next(rounds))
        InnerPhase(plan, settings).run(list(pool.trainers.values()), pool.slots)
        for trainer in pool.trainers.values():
            ends = trainer.cursor.ends([0], BATCH, (UPDATES,))
            trainer.cursor.advance(BATCH, (UPDATES,), ends)

    return run


def data_wait_share(folder: Path, tokens: int) -> float:
    """Of the inner phases of a default run on four ranks: the share in which a rank waited for a batch."""
    run = folder / "run"
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "4", f"run.directory={run}"]
    subprocess.run(
        [*command, f"budget={tokens}tokens", "tracking=none", "run.report=false"], check=True, capture_output=True
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["round"]]
    return sum(row["data_seconds"] for row in trained) / sum(row["seconds"]["inner"] for row in trained)


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpora(folder)
        trained = run_ranks(train_both_ways, [0, 0], name, 6 if options.quick else 24)
        ways = list(trained[0])
        seconds = {
            way: [max(rank[way][place] for rank in trained) for place in range(len(trained[0][way]))] for way in ways
        }
        processed = 2 * UPDATES * BATCH * 128
        rows = [
            [f"train tiny from {way}", "2 ranks", *spread([processed / one for one in seconds[way]])] for way in ways
        ]
        read: dict[tuple[str, int], list[float]] = {}
        for _ in range(2 if options.quick else 5):
            for kind, overrides in corpora(folder).items():
                for workers in (1, 4):
                    updates = 2000 if kind == "token file" else 200
                    read.setdefault((kind, workers), []).append(
                        tokens_per_second(overrides, workers, updates // workers)
                    )
        rows += [[kind, str(workers), *spread(values)] for (kind, workers), values in read.items()]
        consumed = processed / 2 / sorted(seconds["token file"])[len(seconds["token file"]) // 2]
        loaded = sorted(read["token file", 1])[len(read["token file", 1]) // 2]
        figures = {
            "token_file_over_model": loaded / consumed,
            "stream_over_token_file": median_ratio(seconds["token file"], seconds["gzip, streamed"]),
            "data_wait_share": data_wait_share(folder, 200_000 if options.quick else 1_200_000),
        }
    columns = ["batches of 4 x 128 tokens: tokens per second", "workers", "min", "median", "max"]
    report("data", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()

"""What the library's NoiseScale costs a training loop, and how far its trace is from the exact one.

overhead: AdamW updates of a model of 5M parameters with and without a measurement, by itself and under
DistributedDataParallel on two ranks; once in 20 updates. accuracy: a small model on text that stands still, against the
gradients of all sequences.
"""

import math
import statistics
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adloco_dist import NoiseScale
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenBatch, TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.losses import losses
from adloco_dist.pool.flat_model import FlatModel
from common import interleave, parse, report, save, together
from helpers.gradients import per_sequence_gradients
from helpers.processes import run_ranks

# 5.0M parameters.
MODEL = (
    "model.overrides={hidden_size: 256, intermediate_size: 688, num_hidden_layers: 6, num_attention_heads: 4, "
    "num_key_value_heads: 4, tie_word_embeddings: true}"
)
VOCAB_SIZE, NUM_TOKENS = 1024, 128
NUM_PASSES, PASS_SEQUENCES = 2, 2
"""Of each rank and update."""
EVERY_UPDATES = 20
NUM_POPULATION, NUM_CHUNKS, CHUNK_SEQUENCES = 256, 16, 4
"""Of accuracy: sequences to draw from, with replacement, and what an update takes of them."""


# --- overhead


def seconds_of_updates(runtime: Runtime, pairs: int) -> Any:
    """Of an update with a measurement, and of one without, pair by pair."""
    settings = compose([MODEL, f"data.sequence_length={NUM_TOKENS}"])
    model = LanguageObjective.fitted(settings, Vocabulary(VOCAB_SIZE)).build(torch.device("cpu"), in_bf16=False)
    model.config.use_cache = False
    wrapped = DistributedDataParallel(model) if runtime.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(runtime.rank)
    shape = (NUM_PASSES, PASS_SEQUENCES, NUM_TOKENS + 1)
    passes = [TokenBatch.packed(tokens) for tokens in torch.randint(VOCAB_SIZE, shape, generator=generator)]

    noise = NoiseScale(wrapped, every_updates=3)
    state = noise.state_dict()

    def take(update: int) -> None:
        noise.load_state_dict({**state, "updates": update})
        for batch in passes:
            (losses(wrapped, batch).mean() / NUM_PASSES).backward()
            noise.observe(PASS_SEQUENCES)
        noise.update()
        optimizer.step()
        optimizer.zero_grad()

    # Of every three updates the first is measured; the second leaves nothing to do for a next one.
    seconds = interleave([together(lambda: take(0)), together(lambda: take(1))], pairs)
    return seconds, sum(parameter.numel() for parameter in model.parameters())


def overhead(quick: bool) -> tuple[list[list[str]], dict[str, float]]:
    rows, worst = [], -math.inf
    for name, nodes in (("alone", [0]), ("DDP on two ranks", [0, 0])):
        measured, plain, num_parameters = [], [], 0
        for _ in range(1 if quick else 4):
            seconds, num_parameters = run_ranks(seconds_of_updates, nodes, 10)[0]
            measured += seconds[0]
            plain += seconds[1]
        extra = [mine - other for mine, other in zip(measured, plain, strict=True)]
        update = statistics.median(plain)
        shares = [seconds / (EVERY_UPDATES * update) for seconds in extra]
        quartiles = [f"{100 * value:.2f}" for value in statistics.quantiles(shares, n=4)]
        rows.append([f"{name}, {num_parameters / 1e6:.1f}M parameters", f"{1e3 * update:,.0f}",
                     f"{1e3 * statistics.median(extra):,.1f}", *quartiles])  # fmt: skip
        worst = max(worst, statistics.median(shares))
    return rows, {"noise_overhead": worst}


# --- accuracy


def accuracy(quick: bool) -> tuple[list[list[str]], dict[str, float]]:
    """The figure is the root mean square, over repetitions, of the relative error of the smoothed trace."""
    settings = compose(["model=nano"])
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    device = torch.device("cpu")
    flat_model = FlatModel(objective.build(device, in_bf16=False), device, settings.precision)
    flat_model.initial_weights()
    assert isinstance(splits.table, TokenTable)
    population = splits.table.batch(torch.arange(NUM_POPULATION).numpy())
    gradients = per_sequence_gradients(flat_model, objective, population)[0].double()
    mean = gradients.mean(0)
    trace = float((gradients - mean).square().sum(1).mean())
    noise_scale = trace / float(mean @ mean)

    rows, errors = [], []
    torch.manual_seed(1)
    for number in range(3 if quick else 10):
        estimate = _measured_at_rest(flat_model.module, population, first_update=1000 * number)
        errors.append(estimate.trace / trace - 1)
        rows.append([str(number), f"{errors[-1]:+.1%}", f"{estimate.trace_error / trace:.1%}",
                     f"{estimate.noise_scale / noise_scale - 1:+.1%}",
                     f"{estimate.noise_scale_error / noise_scale:.1%}"])  # fmt: skip
    return rows, {"noise_trace_error": math.sqrt(statistics.fmean(error**2 for error in errors))}


def _measured_at_rest(module: nn.Module, population: TokenBatch, first_update: int) -> Any:
    noise = NoiseScale(module, every_updates=1)
    noise.load_state_dict({**noise.state_dict(), "updates": first_update})  # signs of its own
    estimate = None
    for _ in range(40):
        for ids in torch.randint(NUM_POPULATION, (NUM_CHUNKS, CHUNK_SEQUENCES)):
            (losses(module, TokenBatch.packed(population.tokens[ids])).mean() / NUM_CHUNKS).backward()
            noise.observe(CHUNK_SEQUENCES)
        estimate = noise.update()
        module.zero_grad()
    return estimate


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=["overhead", "accuracy"], help="one of the two parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    if options.only in (None, "overhead"):
        rows, found = overhead(options.quick)
        figures |= found
        columns = ["", "update ms", "extra ms", f"% of {EVERY_UPDATES} updates: quartile", "median", "quartile"]
        tokens = f"{NUM_PASSES} passes of {PASS_SEQUENCES} sequences of {NUM_TOKENS} tokens"
        report(f"one measured update in {EVERY_UPDATES}, {tokens}", columns, rows, found, None)
    if options.only in (None, "accuracy"):
        rows, found = accuracy(options.quick)
        figures |= found
        columns = ["repetition", "trace: error", "its error bar", "noise scale: error", "its error bar"]
        chunks = f"{NUM_CHUNKS} chunks of {CHUNK_SEQUENCES} sequences"
        report(f"nano at its initial weights, 40 measurements of {chunks}, span 0.2", columns, rows, found, None)
    if options.json:
        save(figures, options.json)


if __name__ == "__main__":
    main()

"""Right and wrong values of settings, of which random command lines are made."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from adloco_dist.config.compose import GROUPS
from adloco_dist.config.settings import setting_names

Command = dict[str, Any]
"""Values by key or group."""

SHAPES = {
    "llama": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
}  # fmt: skip
MEASURED = ("norm_test", "inner_product_test", "augmented_inner_product_test")
RECORDED = {1: ("alone", 3), 2: ("pair", 3)}
"""Runs whose batches and merges can be repeated: folder and rounds, by the number of trainers."""

# What fits with everything else, as far as it has an effect.
FREE: Mapping[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 1 << 32),
    "precision": st.sampled_from(["fp32", "bf16", "fp64"]),
    "final": st.sampled_from(["best", "average"]),
    "pool.placement": st.sampled_from(["pack", "spread"]),
    "pool.outer_state": st.sampled_from(["device", "cpu"]),
    "outer.lr": st.floats(0.1, 1.0),
    "inner": st.sampled_from(["adamw", "sgd", "muon"]),
    "inner.lr": st.floats(1e-5, 1e-2),
    "inner.beta1": st.floats(0, 0.99),
    "inner.beta2": st.floats(0.5, 0.999),
    "inner.eps": st.sampled_from([1e-10, 1e-8, 1e-4]),
    "inner.momentum": st.floats(0, 0.95),
    "inner.weight_decay": st.floats(0, 0.2),
    "inner.clip_norm": st.sampled_from(["null", 0.1, 1.0]),
    "inner.schedule": st.sampled_from(["wsd", "constant", "cosine"]),
    "inner.decay_fraction": st.floats(0.05, 1),
    "inner.warmup_fraction": st.floats(0, 0.9),
    "inner.final_lr_fraction": st.floats(0, 1),
    "inner.lr_scaling": st.sampled_from(["none", "sqrt", "linear"]),
    "inner.reset_each_round": st.booleans(),
    "batching.eta": st.floats(0.1, 2.0),
    "batching.theta": st.floats(0.1, 2.0),
    "batching.nu": st.floats(0.5, 10.0),
    "batching.gradient_norm": st.sampled_from(["unbiased", "plugin"]),
    "batching.span": st.floats(0, 1),
    "batching.min_batch": st.integers(1, 4),
    "batching.max_batch": st.sampled_from(["null", 4, 7, 64]),
    "batching.growth_limit": st.floats(1.1, 4.0),
    "batching.unmeasured": st.sampled_from(["keep", "grow"]),
    "batching.ramp_factor": st.floats(1.05, 3.0),
    "batching.capacity": st.sampled_from(["null", 1, 2, 3, 8]),
    "batching.padding_fraction": st.floats(0.1, 1.0),
    "merge.width": st.integers(2, 4),
    "evaluation.every": st.sampled_from(["null", "1rounds", "2rounds", "5%", "100%"]),
    "evaluation.sequences": st.integers(1, 20),
    "evaluation.final_sequences": st.sampled_from(["null", 1, 3, 40]),
    "data.shards": st.sampled_from(["disjoint", "shared"]),
    "cluster.memory_bytes": st.sampled_from(["null", 10_000_000, 1 << 40]),
    "cluster.threads_per_rank": st.sampled_from(["null", 1, 2, 3]),
    "checkpoint.every": st.sampled_from(
        ["null", "1rounds", "2rounds", "1tokens", "100tokens", "1e-6minutes", "10minutes"]
    ),
    "checkpoint.keep_last": st.integers(1, 3),
    "tracking": st.sampled_from(["auto", "offline", "none", "tensorboard"]),
}

# What contradicts something that is often there, or itself; each is a whole fragment of a command line.
CONTRADICTIONS: Sequence[Command] = (
    {"algorithm": "ddp", "pool.trainers": 2},
    {"algorithm": "ddp", "batching.request": "norm_test"},
    {"algorithm": "ddp", "pool.workers_per_trainer": 3},
    {"algorithm": "ddp", "batching.request": "none", "instances.concurrency": "threads"},
    {"batching.request": "none", "batching.replay": "pair"},
    {"batching.request": "replay", "batching.replay": "nowhere"},
    {"batching.request": "replay", "batching.replay": "words.txt"},
    {"batching.request": "replay", "batching.replay": "pair", "pool.trainers": 3},
    {"batching.request": "replay", "batching.replay": "pair", "budget": "4rounds"},
    {"batching.request": "replay", "batching.replay": "pair", "budget": "1seconds"},
    {"batching.request": "staged"},
    {"batching.request": "staged", "batching.stages": "[[0,4],[0.5]]"},
    {"batching.request": "staged", "batching.stages": "[[0.5,4],[0,8]]"},
    {"batching.request": "staged", "batching.stages": "[[0,4],[0.5,0]]"},
    {"batching.request": "norm_test", "batching.stages": "[[0,4]]"},
    {"batching.min_batch": 8, "batching.max_batch": 4},
    {"batching.request": "none", "batching.switch_n": "auto"},
    {"batching.request": "norm_test", "batching.switch_n": "auto", "instances.concurrency": "threads"},
    {"merge.min_trainers": 5},
    {"merge": "none", "merge.min_trainers": 5},
    {"budget": 1},
    {"budget": "null"},
    {"instances.resident": 1, "instances.concurrency": "threads"},
    {"instances.concurrency": "streams"},
    {"instances.concurrency": "threads", "cluster.device": "cuda"},
    {"cluster.device": "cpu", "cluster.backend": "nccl"},
    {"data": "python_stdlib", "data.train": "[words.txt]"},
    {"data": "text", "data.train": "[nowhere/*.txt]"},
    {"data": "text", "data.train": "[.]"},
    {"data": "text", "data.train": "[empty.txt]"},
    {"data": "text", "data.train": "[words.txt]", "data.validation": "[empty.txt]"},
    {"data": "tokens", "data.train": "[words.txt]"},
    {"data": "tokens", "data.train": "[signed.npy]"},
    {"data": "tokens", "data.train": "[square.npy]"},
    {"data": "tokens", "data.train": "[empty.npy]"},
    {"data": "text", "data.train": "[short.txt]"},
    {"data.sequence_length": 5_000},
    {"data.validation_fraction": 1e-9},
    {"data.validation_fraction": 0.999},
    {"pool.trainers": 500},
    {"pool.trainers": 1, "pool.workers_per_trainer": 1},
    {"pool.trainers": 2, "pool.workers_per_trainer": 1},
    {"pool.workers_per_trainer": 2_000},
    {"cluster.memory_bytes": 1},
    {"+model.overrides.vocab_size": 3},
    {"+model.overrides.hiden_size": 3},
    {"model": "causal", "model.architecture": "null"},
    {"model": "causal", "model.architecture": "lama"},
    {"model": "causal", "model.architecture": "t5"},
    {"model": "pretrained", "model.warm_start": "nowhere"},
    {"model": "pretrained", "model.warm_start": "broken"},
    {"seed": 1 << 70},
    {"batching.local_batch": 10**12},
    {"batching.max_batch": 10**30, "batching.local_batch": 10**30},
    {"batching.growth_limit": 1e308},
    {"batching.request": "ramp", "batching.ramp_factor": 1e308},
    {"batching.request": "staged", "batching.stages": f"[[0,{10**400}]]"},
    {"experiment": "two_by_two", "pool.trainers": 0},
    {"experiment": "nothing"},
)  # fmt: skip
SHAPE_MISTAKES: Sequence[Command] = (
    {"hidden_size": 7}, {"hidden_size": 0}, {"hidden_size": -8}, {"hidden_size": "big"}, {"num_hidden_layers": 0},
    {"num_hidden_layers": -1}, {"num_attention_heads": 0}, {"num_attention_heads": 3}, {"num_key_value_heads": 3},
    {"hidden_act": "wavy"}, {"intermediate_size": "null"}, {"rms_norm_eps": "x"}, {"vocab_size": 0},
    {"vocab_size": "many"}, {"max_position_embeddings": 2}, {"pad_token_id": 5_000}, {"attention_dropout": 2.0},
)  # fmt: skip
UNREADABLE = (
    "pool.trainers", "=3", "pool.trainers=1,2", "inner.lr=[1,2", "inner.lr=1e-3,1e-4", "~merge", "~inner.lr", "+foo=1",
    "++pool.trainers=2", "+pool.trainers=2", "pool=4", "inner.adam.lr=1", "lr=0.1", "inner={lr: 0.1}", "merge=null",
    "mergee=none", "algorithm=adam", "model.overrides=3", "model.overrides={a: {b: c}}", "inner.lr=${outer.lr}",
    "inner.lr=${nowhere}", "inner.lr=${oc.env:NOWHERE}", "seed=range(1,3)", "inner.lr=interval(0,1)", "@", "", " ",
    "--help", "data.train=words.txt", "data.train=[words.txt", "a b=c", "pool.trainers==2", "hydra.run.dir=x",
    "hydra.foo=1", "hydra/launcher=nothing", "algorithm@x=ddp", "model.overrides.hidden_size=8", "seed='0", "budget=",
    "inner.lr=", "pool.trainers=\u0664", "model.architecture=", "outer@inner=sgd", "experiment=[two_by_two]",
)  # fmt: skip
ODD = (
    "-1", "0", "1", "-0.5", "0.5", "1.5", "nan", "-inf", "null", "true", "abc", "''", "[]", "[0]", "[1]", "[-1]",
    "[abc]", "[null]", "[[1]]", "{}", "{a: 1}", "1e-300", "0x10", "1_1", "'1'", "[0,0.5,nan]", "a/b", "'a\\nb'",
)  # fmt: skip
"""Values of which every setting must refuse some."""
NODES = ((0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 1))
"""The node of every rank."""
KEYS = (*setting_names(), *GROUPS)

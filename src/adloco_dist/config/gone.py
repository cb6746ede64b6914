"""Settings, and choices of settings, that an earlier release had: each is refused in one line that says what to do."""

from adloco_dist.config.errors import SettingsError

GONE = {
    "inner.warmup_tokens": "set inner.warmup_fraction",
    "batching.smoothing": "set batching.span",
    "batching.least_batch": "set batching.min_batch",
    "batching.largest_batch": "set batching.max_batch",
    "outer.spoilt_rounds": "a run always stops after 10 such rounds in a row",
    "outer.nonfinite_rounds": "a run always stops after 10 such rounds in a row",
    "outer.nesterov": "an outer momentum is always Nesterov's",
    "outer.clip_norm": "pseudo-gradients are always averaged as they are; inner.clip_norm bounds gradients",
    "outer.radial": "means are always plain",
    "outer.outlier_deviations": "workers are always left out where they are not finite, and only there",
    "outer.outlier_rounds": "workers are always left out where they are not finite, and only there",
    "wire.error_feedback": "wire=sparse always keeps what it has not sent, other formats never do",
    "wire.residual_decay": "it is always 0.95 with wire=sparse",
    "run.unfinished=set_aside": "set run.unfinished=archive",
    "algorithm.round=speed": "set algorithm.round=link, with which slower ranks take fewer updates",
    "algorithm.round=seconds": "set algorithm.round=link, with which slower ranks take fewer updates",
    "algorithm.round_seconds": "set algorithm.round=link, with which slower ranks take fewer updates",
    "algorithm.exposed_share": "it is always 0.2",
    "algorithm.min_updates": "set algorithm.updates_range to the minimum and the maximum",
    "algorithm.max_updates": "set algorithm.updates_range to the minimum and the maximum",
    "inner.reference_batch": "the rate is one worker's, whatever its batch; set another inner.lr",
    "inner.batch_scaling": "the rate follows the workers that average, not the batch; set inner.lr_scaling",
    "batching.estimator": "gradients are always measured by sketches",
    "batching.chunks": "a worker's batch is always cut into at most 4 chunks",
    "batching.may_shrink": "set batching.shrink_limit=1 for false",
    "batching.stage_fractions": "set batching.stages to pairs of a fraction and a batch",
    "batching.stage_batches": "set batching.stages to pairs of a fraction and a batch",
    "switch.n": "set batching.switch_n",
    "switch.mode": "set batching.switch_n=1 for accumulate, batching.switch_n=null for clip",
    "switch.batch_limit": "set batching.capacity",
    "merge.weights": "members always count for their bounded requests",
    "merge.radial": "averages of anchors are always plain",
    "merge.released_workers": "workers always join the survivor",
    "merge.freed": "workers always join the survivor",
    "merge.simultaneous": "it is always one merge; set merge.width or merge.every_rounds",
    "budget.rounds": "set budget to a number of rounds, as in budget=20rounds",
    "budget.tokens": "set budget to a number of tokens, as in budget=1.2e6tokens",
    "budget.seconds": "set budget to a number of seconds, as in budget=120seconds",
    "budget.epochs": "set budget to a number of epochs, as in budget=2epochs",
    "evaluation.every_rounds": "set evaluation.every, as in evaluation.every=5rounds",
    "evaluation.every_fraction": "set evaluation.every, as in evaluation.every=5%",
    "evaluation=final_only": "set evaluation.every=null",
    "checkpoint.every_rounds": "set checkpoint.every, as in checkpoint.every=5rounds",
    "checkpoint.every_tokens": "set checkpoint.every, as in checkpoint.every=1e6tokens",
    "checkpoint.every_minutes": "set checkpoint.every, as in checkpoint.every=10minutes",
    "evaluation.batch": "an evaluation always takes 16 sequences at once, fewer where batching.capacity is less",
    "cluster.control_seconds": "set cluster.timeout_seconds",
    "cluster.outer_seconds": "set cluster.timeout_seconds",
    "cluster.heartbeat_seconds": "it is always a tenth of cluster.silence_seconds",
    "cluster.max_communicators": "it is always 8 with cluster.backend=nccl, and any number with gloo",
    "tracking.name": "Weights & Biases always reads WANDB_NAME; without it a run has the name of its run.directory",
    "tracking.tags": "Weights & Biases always reads WANDB_TAGS, as in WANDB_TAGS=first,second",
    "run.stop_file": "it is always the file `stop` in the run directory, or what ADLOCO_STOP_FILE names",
    "run.watch_address": "set run.watch to an address and a port, as in run.watch=0.0.0.0:8080",
    "data.subset": "set data.hub to NAME:SUBSET, as allenai/c4:en",
    "data.revision": "set data.hub to NAME@REVISION or NAME:SUBSET@REVISION",
    "data.nulls": "set data.damaged to skip, which leaves out rows without a value, too",
    "data.vocab_size": "the vocabulary always ends with the largest id; vocab_size in model.overrides may be larger",
    "model.revision": "set model.warm_start to NAME@REVISION",
    "model.fuse_loss": "the loss is always fused on a GPU where torch can compile",
}
"""What to do instead: which setting to set, or that something is always so; by setting, or by setting=choice."""


def refuse_gone(key: str, value: object) -> None:
    """Refuse a setting, or a choice of one, that is no more, by a SettingsError."""
    for name in (key, f"{key}={value}"):
        if name in GONE:
            raise SettingsError.of(key, value, f"is gone since this release; {GONE[name]}")

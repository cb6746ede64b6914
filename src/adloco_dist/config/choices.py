"""Settings that name one of a few ways, as enums: Hydra then refuses other words. Their fields say what words mean."""

from enum import StrEnum

Precision = StrEnum("Precision", ["auto", "fp32", "bf16", "fp64"])
Placement = StrEnum("Placement", ["pack", "spread"])
OuterState = StrEnum("OuterState", ["device", "cpu"])
Averages = StrEnum("Averages", ["pseudo_gradients", "gradients"])
WireFormat = StrEnum("WireFormat", ["fp32", "bf16", "int8", "int4", "signs", "sparse", "adaptive"])
RoundLength = StrEnum("RoundLength", ["updates", "link"])
InnerOptimizer = StrEnum("InnerOptimizer", ["adamw", "sgd", "muon"])
Schedule = StrEnum("Schedule", ["wsd", "constant", "cosine"])
Corpus = StrEnum("Corpus", ["python_stdlib", "python_packages", "text", "json", "parquet", "csv", "hub", "tokens"])
Packing = StrEnum("Packing", ["packed", "document"])
Damaged = StrEnum("Damaged", ["refuse", "skip"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])
Backend = StrEnum("Backend", ["auto", "gloo", "nccl"])
TrackingMode = StrEnum("TrackingMode", ["auto", "online", "offline", "disabled"])
BatchRequest = StrEnum(
    "BatchRequest",
    ["norm_test", "inner_product_test", "augmented_inner_product_test", "progress", "none", "ramp", "staged", "replay"],
)
GradientNorm = StrEnum("GradientNorm", ["unbiased", "plugin"])
Unmeasured = StrEnum("Unmeasured", ["keep", "grow"])
RateScaling = StrEnum("RateScaling", ["none", "sqrt", "linear"])
Shards = StrEnum("Shards", ["disjoint", "shared"])
MergePolicy = StrEnum("MergePolicy", ["worst_with_worst", "best_with_worst", "worst_loss_with_best", "none"])
Final = StrEnum("Final", ["best", "average"])
Concurrency = StrEnum("Concurrency", ["serial", "streams", "threads", "auto"])
Unfinished = StrEnum("Unfinished", ["refuse", "archive", "resume"])

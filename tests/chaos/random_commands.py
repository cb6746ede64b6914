"""Random command lines: most of them right, others with a mistake or two."""

import shlex
from dataclasses import dataclass

from hypothesis import strategies as st

from chaos.values import (
    CONTRADICTIONS,
    FREE,
    KEYS,
    MEASURED,
    NODES,
    ODD,
    RECORDED,
    SHAPE_MISTAKES,
    SHAPES,
    UNREADABLE,
    Command,
)


@dataclass(frozen=True)
class Start:
    """What a user types, and on how many ranks."""

    nodes: tuple[int, ...]
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.nodes)} rank(s) on nodes {list(self.nodes)}: {shlex.join(self.overrides)}"


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], Command]:
    """Ranks on nodes, and a pool with a worker for each of them."""
    trainers, workers = draw(st.sampled_from([1, 2, 2, 3, 4])), draw(st.sampled_from([None, 1, 2, 3]))
    nodes = draw(st.sampled_from(NODES))
    while trainers * (workers or max(1, len(nodes) // trainers)) < len(nodes):
        nodes = nodes[:-1]
    return nodes, {"pool.trainers": trainers, "pool.workers_per_trainer": "null" if workers is None else workers}


@st.composite
def corpora(draw: st.DrawFn) -> Command:
    length = {"data.sequence_length": draw(st.integers(2, 24))}
    fraction = draw(st.fixed_dictionaries({}, optional={"data.validation_fraction": st.floats(0.05, 0.6)}))
    files = draw(st.sampled_from(["[words.txt]", "['*s.txt']", "[words.txt,other.txt]", "[tokens.npy]"]))
    if "npy" in files:
        optional = {"data.validation": st.just("[tokens.npy]")}
        return {"data": "tokens", "data.train": files, **length, **fraction,
                **draw(st.fixed_dictionaries({}, optional=optional))}  # fmt: skip
    held_out = draw(st.fixed_dictionaries({}, optional={"data.validation": st.just("[other.txt]")}))
    return {"data": "text", "data.train": files, **length, **fraction, **held_out}


@st.composite
def models(draw: st.DrawFn) -> Command:
    architecture = draw(st.sampled_from(["llama", "llama", *SHAPES]))
    shape = dict(SHAPES[architecture])
    if architecture == "gpt2" and draw(st.booleans()):
        shape["embd_pdrop"] = 0.1
    return {"model": "causal", "model.architecture": architecture,
            **{f"+model.overrides.{name}": value for name, value in shape.items()}}  # fmt: skip


@st.composite
def batches(draw: st.DrawFn, trainers: int, algorithm: str) -> Command:
    """A request with what belongs to it alone, and a budget that it allows."""
    open_loop = [*(["replay"] if trainers in RECORDED else []), "staged", "ramp", "none"]
    request = draw(st.sampled_from(open_loop if algorithm == "ddp" else [*MEASURED * 2, *open_loop]))
    command: Command = {"batching.request": request, "batching.local_batch": draw(st.integers(1, 5))}
    most_rounds = 3
    if request == "staged":
        stages = ["[[0,6]]", "[[0,3],[0.3,9]]", "[[0,8],[0.3,2],[0.6,5]]"]
        command["batching.stages"] = draw(st.sampled_from(stages))
    if request == "replay":
        command["batching.replay"], most_rounds = RECORDED[trainers]
    if request in MEASURED:
        words = st.sampled_from(["auto", "null"])
        command["batching.switch_n"] = draw(st.one_of(words, st.floats(1, 4), st.integers(1, 3)))
    budgets = [f"{draw(st.integers(1, most_rounds))}rounds"] * 3
    if request != "replay":
        budgets.append(f"{draw(st.integers(1, 2_000))}tokens")
        budgets.append(f"{draw(st.floats(1.0, 1.5))}seconds")
    return command | {"budget": draw(st.sampled_from(budgets))}


@st.composite
def merges(draw: st.DrawFn, trainers: int) -> Command:
    policy = draw(st.sampled_from(["worst_with_worst", "best_with_worst", "none"]))
    if policy == "none":
        return {"merge": policy}
    optional = {"merge.min_trainers": st.integers(1, trainers)}
    return {
        "merge": policy,
        "merge.every_rounds": draw(st.integers(1, 2)),
        **draw(st.fixed_dictionaries({}, optional=optional)),
    }


@st.composite
def outer_steps(draw: st.DrawFn, algorithm: str) -> Command:
    command: Command = {"algorithm": algorithm, "algorithm.updates_per_round": draw(st.integers(1, 3))}
    has_residual = algorithm == "adloco"
    if draw(st.booleans()):
        command["outer"] = draw(st.sampled_from(["sgd", "average", *([] if has_residual else ["nesterov"])]))
    elif draw(st.booleans()):
        momentum = draw(st.floats(0, 0.0 if has_residual else 0.95))
        command["outer.momentum"] = momentum
    return command


@st.composite
def wires(draw: st.DrawFn, updates: int) -> Command:
    fragments = draw(st.integers(1, updates))
    return {
        "wire": draw(st.sampled_from(["fp32", "bf16", "int8", "int4", "sparse"])),
        "wire.fragments": fragments,
        "wire.delay_updates": draw(st.integers(0, updates // fragments - 1)),
    }


@st.composite
def right(draw: st.DrawFn) -> tuple[tuple[int, ...], Command]:
    """A command line that most often has nothing wrong with it."""
    algorithm = draw(st.sampled_from(["diloco", "diloco", "adloco", "localsgd", "ddp"]))
    nodes, pool = draw(pools())
    if algorithm == "ddp":
        pool = {"pool.trainers": 1, "pool.workers_per_trainer": draw(st.sampled_from(["null", len(nodes)]))}
    trainers = pool["pool.trainers"]
    command = {
        **draw(models()),
        **draw(corpora()),
        **draw(outer_steps(algorithm)),
        **pool,
        **draw(batches(trainers, algorithm)),
        **draw(merges(trainers)),
        **draw(st.fixed_dictionaries({}, optional=dict(FREE))),
    }
    if algorithm != "ddp" and draw(st.booleans()):
        command |= draw(wires(command["algorithm.updates_per_round"]))
        if command["wire"] == "sparse":  # what it keeps for later allows no outer momentum
            command |= {"outer": "average", "outer.momentum": 0.0}
    ways = ["auto", "serial"]
    if (
        algorithm != "ddp"
        and command.get("batching.switch_n") != "auto"
        and command.get("+model.overrides.embd_pdrop") != 0.1
    ):
        ways = ["threads", *ways]
    command["instances.concurrency"] = draw(st.sampled_from(ways))
    return nodes, command


@st.composite
def wrong(draw: st.DrawFn, command: Command) -> Command:
    """The same with one thing that may well be a mistake."""
    match draw(st.sampled_from(["value", "value", "contradiction", "contradiction", "shape"])):
        case "value":
            key = draw(st.sampled_from(KEYS))
            return command | {key: draw(st.sampled_from([*ODD, "inf"]))}
        case "contradiction":
            return command | draw(st.sampled_from(CONTRADICTIONS))
        case _:
            shape = {**SHAPES["llama"], **draw(st.sampled_from(SHAPE_MISTAKES))}
            others = {key: value for key, value in command.items() if not key.startswith("+model.overrides")}
            return {**others, "model.architecture": "llama",
                    **{f"+model.overrides.{name}": value for name, value in shape.items()}}  # fmt: skip


@st.composite
def starts(draw: st.DrawFn) -> Start:
    nodes, command = draw(right())
    num_mistakes = draw(st.sampled_from([0, 0, 0, 0, 1, 1, 2]))
    unreadable = []
    for _ in range(num_mistakes):
        if draw(st.integers(0, 4)) == 0:
            unreadable.append(draw(st.sampled_from(UNREADABLE)))
        else:
            command = draw(wrong(command))
    written = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in command.items()]
    return Start(nodes, (*written, *unreadable))

"""What all ranks agree on before training, and everything that can be refused by then."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adloco_dist.checkpoint.resume import differing
from adloco_dist.checkpoint.state import RunState
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.environment import Environment, Link, code_here, measure_links, must_agree, survey
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend, RunSettings, Settings, SettingsError, require
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.data.protocols import Splits
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.layout import Layout, experiment_layout
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.replay import Trajectory, check_trajectory
from adloco_dist.pool.capacity import available_bytes, state_bytes
from adloco_dist.run.directory import RunDirectory, existing_part, open_directory
from adloco_dist.run.reading import read_plans, read_run, read_trajectory, settings_of
from adloco_dist.run.tracking import check_trackers
from adloco_dist.setup.parts import Parts, Task
from adloco_dist.text import counted, first_difference, values_by_rank

OF_THE_NODE = {"batching.capacity", "cluster.interface", "cluster.memory_bytes", "cluster.threads_per_rank"}
"""Settings that may differ between nodes: they say how a device does its work, not what the run computes."""

PROBE_BYTES = 1 << 20
"""Payload that measures a link before training: 0.1 s at 100 Mbit/s."""
LINK_SECONDS = 120.0


def survey_cluster(runtime: Runtime, settings: Settings) -> tuple[list[Environment], list[Link]]:
    """Every rank's environment, and the links between nodes where the settings ask to measure them. Collective; raises
    a SettingsError on all ranks when some run other code than others."""
    environments = survey(runtime, run_disk(settings.run))
    _refuse_difference([must_agree(environment) for environment in environments])
    is_measured = settings.cluster.check_links
    return environments, measure_links(runtime, Backend.gloo, PROBE_BYTES, LINK_SECONDS) if is_measured else []


def run_disk(run: RunSettings) -> Path:
    """The folder on whose disk the run directory is, or will be made."""
    return existing_part(Path(run.directory or run.root))


def compare_settings(control: ControlPlane, settings: Settings) -> None:
    """Check that all ranks run the same experiment; raises a SettingsError on all ranks, with a setting and its values
    by rank."""
    _refuse_difference(control.exchange(_common(settings)))


def _common(settings: Settings) -> dict[str, Any]:
    """The settings that must be the same on all nodes, by dotted key."""
    return {key: value for key, value in flatten(to_plain(settings)).items() if key not in OF_THE_NODE}


def facts_of_node(settings: Settings, splits: Splits) -> dict[str, str]:
    """What a node must have in common with those whose run it wants to take part in."""
    common = {key: str(value) for key, value in _common(settings).items()}
    return {**code_here(), **common, "the digest of the data": splits.digest}


def _refuse_difference(members: list[dict[str, str]]) -> None:
    if difference := first_difference(members):
        raise SettingsError(f"{difference}; start every node with the same command and code")


def prepare(
    settings: Settings, runtime: Runtime, parts: Parts, resumed: RunState | None = None, task: Task | None = None
) -> tuple[Layout, Splits, Objective, Trajectory]:
    """Everything that can be refused before a run exists: layout, corpus, the model's shape, batches to replay.

    The batches are known on rank 0 alone, which plans with them. `resumed` is where the run resumes; None: it begins.
    `task` is what was read before; None: it is read now.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake.
    """
    layout = resumed.plan.layout if resumed else experiment_layout(settings, runtime.nodes)
    trajectory = Trajectory()
    with runtime.control.agreed():
        is_first_of_node = runtime.nodes.index(runtime.nodes[runtime.rank]) == runtime.rank
        task = task or Task.of(parts, settings, reads_weights=is_first_of_node)
        splits, objective = task.splits, task.objective
        if not resumed:
            splits.train.check_size(len(layout.trainers), layout.num_workers(0), settings.data.shards)
        is_known = settings.budget_amount.unit != "epochs" or splits.train.num_sequences is not None
        rule = "a stream does not know how long an epoch is; give the budget in tokens, rounds or seconds"
        require(is_known, "budget", settings.budget, rule)
        if resumed and splits.digest != resumed.corpus:
            digests = f"digest {splits.digest[:8]}, {resumed.corpus[:8]} then"
            rule = f"{splits.source} is not what the run was trained on ({digests})"
            raise SettingsError(f"{parts.data_name(settings)}: {rule}; give it the same")
        check_memory(settings, runtime, layout, objective)
        if runtime.rank == 0:
            trajectory = examine_replay(settings, None if resumed else layout)
            check_trackers(settings.tracking)
    corpora = runtime.control.exchange({"digest": splits.digest, "source": splits.source})
    if len({corpus["digest"] for corpus in corpora}) > 1:
        by_rank = values_by_rank(enumerate(f"{corpus['source']} {corpus['digest'][:8]}" for corpus in corpora))
        raise SettingsError(f"{parts.data_name(settings)} differs between ranks: {by_rank}; give all the same")
    return layout, splits, objective, trajectory


def examine_replay(settings: Settings, layout: Layout | None) -> Trajectory:
    """The batches and merges to replay, if any. `layout` is that of a run that begins; None: the run resumes. Raises a
    SettingsError where they cannot be read, or are of another pool."""
    if settings.batching.replay is None:
        return Trajectory()
    trajectory = read_trajectory("batching.replay", settings.batching.replay)
    if layout is not None:
        check_trajectory(settings, layout, trajectory)
    return trajectory


def examine_plans(
    settings: Settings, splits: Splits, layout: Layout, nodes: Sequence[int], first_round: int = 0
) -> Sequence[RoundPlan]:
    """The plans of the run that is repeated, if any; raises a SettingsError where they cannot be read, or are of
    another run than this one, which begins or resumes in this layout in a round that counts from 0. `nodes` has the
    node of every rank."""
    if settings.run.replay is None:
        return ()
    name, directory = "run.replay", Path(settings.run.replay)
    plans, facts = read_plans(name, directory), read_run(directory, name)
    before, wanted = flatten(to_plain(settings_of(directory, facts, name))), flatten(to_plain(settings))
    for key in differing(before, wanted):
        raise SettingsError(f"{key}={wanted[key]}: the run in {name}={directory} had {before[key]}; give it the same")
    corpus = facts["corpus"]
    digests = f"{corpus['source']}, digest {corpus['digest'][:8]}; here {splits.source}, {splits.digest[:8]}"
    is_same = corpus["digest"] == splits.digest
    require(is_same, name, directory, f"was trained on other data ({digests}); give it the same")
    held, plan = facts.get("cluster", {}).get("nodes", []), plans[min(first_round, len(plans) - 1)]
    rule = f"was trained on {counted(len(held), 'rank')} of {counted(len(set(held)), 'node')}; start it on the same"
    require(plan.layout == layout and held == [*nodes], name, directory, rule)
    return plans


def with_known_budget(settings: Settings, splits: Splits) -> Settings:
    """The settings with a budget in epochs as tokens, now that the data are known."""
    budget, sequences = settings.budget_amount, splits.train.num_sequences
    if budget.unit != "epochs" or sequences is None:
        return settings
    tokens = max(1, round(budget.number * sequences)) * settings.data.sequence_length
    return replace(settings, budget=f"{tokens}tokens")


def check_memory(settings: Settings, runtime: Runtime, layout: Layout, objective: Objective) -> None:
    """Refuse a share of the pool, where its size is known before it is built, that this rank has no memory for; raises
    a SettingsError on this rank alone."""
    parameters = objective.num_parameters()
    if parameters is None:
        return
    placed = [len(workers) for workers in layout.placed_on(runtime.seat).values()]
    needed = state_bytes(settings, len(placed), sum(placed), parameters)
    memory, what = settings.cluster.memory_bytes, "are cluster.memory_bytes"
    if runtime.device.type != "cpu" or memory is None:
        sharers = runtime.nodes.count(runtime.nodes[runtime.rank])
        memory, what = available_bytes(runtime.device, sharers), "are available to it"
    if needed > memory:
        need = f"{parameters.total:,} parameters, of which the workers of a rank take {needed / 1e6:,.0f} MB"
        remedy = "use a smaller model, fewer workers per rank, or more memory"
        raise SettingsError(f"{objective.describe()}: has {need}, and {memory / 1e6:,.0f} MB {what}; {remedy}")


def agree_on_directory(
    control: ControlPlane, run: RunSettings, needed_bytes: int, is_resumed: bool = False
) -> tuple[Path, RunDirectory | None]:
    """Rank 0 makes and takes the run directory, where `needed_bytes` must be free; all ranks learn its path, or raise a
    SettingsError when rank 0 cannot have it."""
    directory: RunDirectory | None = None
    with control.agreed():
        if control.rank == 0:
            directory = open_directory(run, needed_bytes, is_resumed)
    reply = control.broadcast({"path": str(directory.path)} if directory else None)
    return Path(reply["path"]), directory

"""What a rank works with: its share of the pool, set up before the first round and changed by every regrouping."""

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import nn

from adloco_dist.cluster.groups import GroupError, Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Algorithm, Backend, MergePolicy, Settings, SettingsError, Shards
from adloco_dist.data.corpora import Splits, TrainerShard
from adloco_dist.data.shards import ShardState
from adloco_dist.data.stream_shard import StreamShard
from adloco_dist.data.streams import RowStreams
from adloco_dist.decisions.batch import largest_local_batch
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.plan import Premises, RoundPlan
from adloco_dist.decisions.regrouping import Regrouping, transfers
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.decisions.report import RankReport
from adloco_dist.decisions.switch import least
from adloco_dist.decisions.typed import NOT_UNDERSTOOD
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.lane import Lane, new_lane
from adloco_dist.pool.residence import Residence
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.round.concurrency import find_lanes
from adloco_dist.round.estimate import GradientEstimator, new_estimator
from adloco_dist.round.examine import examine_module
from adloco_dist.round.gradient import data_parallel
from adloco_dist.round.merge import merge
from adloco_dist.round.probe import count_resident, probe_capacity


@dataclass
class Rank:
    """What this rank works with."""

    settings: Settings
    runtime: Runtime
    splits: Splits
    groups: Groups
    lanes: list[Lane]
    residence: Residence
    shards: dict[int, TrainerShard]
    """Of all trainers, wherever they are hosted: every rank can take any of them over."""
    trainers: dict[int, Trainer]
    """Those with a worker here, by id, ascending."""
    estimators: dict[int, GradientEstimator]
    """By trainer; empty where the batch does not follow the gradients."""
    is_concurrent: bool = False
    """Whether the instances of a rank have their turns at once; the same on all ranks."""

    @property
    def flat_model(self) -> FlatModel:
        """The first lane's: also the scratch and the payload of everything between the inner phases."""
        return self.lanes[0].flat_model

    @property
    def capacity(self) -> int | None:
        """Sequences per pass: of the lane that has run out of memory furthest."""
        return least(*(lane.flat_model.capacity for lane in self.lanes))

    @property
    def workers(self) -> list[Worker]:
        return [worker for trainer in self.trainers.values() for worker in trainer.workers]


def host(
    settings: Settings, runtime: Runtime, splits: Splits, module: nn.Module, layout: Layout,
    shard_states: Mapping[int, ShardState] | None = None,
) -> Rank:  # fmt: skip
    """Set up this rank's share of the pool: every trainer that has a worker here, all from the same weights.

    Collective.

    Args:
        shard_states: of a run that goes on: the trainers' shards; None: they are dealt.

    Raises:
        SettingsError: on all ranks, when one of them cannot do what is asked, or not even one sequence fits on it.
    """
    groups = Groups(runtime.backend, settings.cluster.outer_seconds, settings.cluster.max_communicators)
    _form_groups(groups, layout, runtime)  # before free memory is looked at, of which NCCL takes some for every group
    first = new_lane(module, runtime.device, settings, examine_module(module, settings, runtime))
    flat_model = first.flat_model
    initial_weights = flat_model.initial_weights()
    data, seed = settings.data, settings.seed
    if shard_states is None:
        shards = dict(enumerate(splits.deal(len(layout.trainers), layout.num_workers(0), data, seed)))
    else:  # a run that goes on may have merged some of the trainers that it began with
        try:
            shards = splits.restored(shard_states, settings.pool.trainers, data, seed)
        except NOT_UNDERSTOOD as error:  # on all ranks, for all have the same state
            rule = f"its shards are not of this pool ({type(error).__name__}: {error}); move it away, or begin anew"
            raise SettingsError(f"run.directory={settings.run.directory}: its newest checkpoint: {rule}") from error
    hosted = {id: layout.workers_on(runtime.rank, id) for id in layout.trainers_on(runtime.rank)}
    num_workers = sum(map(len, hosted.values()))
    reserved_bytes = _reserved_bytes(settings, groups, layout, runtime.rank)
    resident = count_resident(first, settings, len(hosted), num_workers, runtime.ranks_on_device, reserved_bytes)
    born_on = runtime.device if resident is None else "cpu"
    trainers = {
        id: Trainer(
            id,
            [Worker(w, initial_weights.to(born_on, copy=True), flat_model, settings.inner) for w in workers],
            initial_weights, flat_model, shards[id], settings,
        )
        for id, workers in hosted.items()
    }  # fmt: skip
    rank = Rank(settings, runtime, splits, groups, [first], Residence(runtime.device, resident), shards, trainers, {})
    rank.residence.settle(rank.workers)
    rank.lanes, rank.is_concurrent = find_lanes(
        first, rank.residence, list(trainers.values()), layout, splits.train, settings, runtime
    )
    # Once everything that takes memory is there, and before a backward pass does more than compute (ddp).
    _find_capacity(rank, layout)
    _set_up_estimators(rank)
    if settings.algorithm.name is Algorithm.ddp:
        (trainer,) = trainers.values()
        group = groups.of(layout.ranks(trainer.id))
        rank.lanes = [replace(first, module=data_parallel(flat_model, trainer.workers[0], group))]
    return rank


def find_premises(rank: Rank, layout: Layout, trajectory: Trajectory) -> Premises:
    """What the plans will stand on: the shards' sizes, and every trainer's batch limit from its ranks' capacities.

    Collective.
    """
    settings = rank.settings
    replies = rank.runtime.control.exchange({"capacity": rank.flat_model.capacity})
    limits = {
        trainer: settings.switch.batch_limit or least(*(replies[rank]["capacity"] for rank in layout.ranks(trainer)))
        for trainer in layout.trainers
    }
    sizes = {trainer: shard.size for trainer, shard in rank.shards.items() if shard.size is not None}
    return Premises(layout, sizes, limits, trajectory, rank.is_concurrent)


def stream_places(rank: Rank, plan: RoundPlan) -> dict[int, list[int]]:
    """At the end of a round, where the streams stand that workers here have read: by stream, its `Place`."""
    train, places = rank.splits.train, {}
    for id, trainer in rank.trainers.items():
        if isinstance(train, RowStreams) and isinstance(trainer.shard, StreamShard):
            workers = [worker.id for worker in trainer.workers]
            sequences = plan.updates * plan.batches[id].local_batch
            for claim in trainer.shard.ends(workers, plan.layout.num_workers(id), sequences):
                places[claim.stream.id] = list(astuple(train.place(claim)))
    return places


def stream_notes(rank: Rank) -> list[str]:
    """What was left out of damaged files since the last call."""
    return rank.splits.train.take_notes() if isinstance(rank.splits.train, RowStreams) else []


def regroup(rank: Rank, before: Layout, plan: RoundPlan, report: RankReport) -> None:
    """Do what the plan says about merges: averaged anchors, united shards, workers of new trainers, groups.

    Collective over the whole world.

    Args:
        before: the layout of the last round.
        report: takes the bytes and the seconds that it cost.
    """
    start = time.perf_counter()
    assert plan.regrouping
    _unite_shards(rank.shards, plan.regrouping, rank.settings)
    report.merge_bytes_sent = _bring_together(rank, before, plan, plan.regrouping)
    for lane in rank.lanes:  # at no instance until the next turn, lest one that has ended is kept alive
        lane.flat_model.point_at(lane.flat_model.gradient)
    rank.groups.form_all(plan.layout.rank_sets)
    _set_up_estimators(rank)
    if rank.runtime.rank in plan.probed:
        del rank.lanes[max(1, len(rank.workers)) :]
        rank.residence.settle(rank.workers)
    if plan.probed:
        _probe_in_turn(rank, plan.layout, takes_part=rank.runtime.rank in plan.probed)
    report.regroup_seconds = round(time.perf_counter() - start, 6)


def _bring_together(rank: Rank, before: Layout, plan: RoundPlan, regrouping: Regrouping) -> dict[int, int]:
    """This rank's trainers and workers after the merges; bytes sent for it, by trainer."""
    old, me = rank.trainers, rank.runtime.rank
    workers = {(trainer.id, worker.id): worker for trainer in old.values() for worker in trainer.workers}
    broken = {id for id, trainer in old.items() if not trainer.is_finite}
    rank.trainers = {
        id: old.get(id) or Trainer(id, [], rank.flat_model.gradient, rank.flat_model, rank.shards[id], rank.settings)
        for id in plan.layout.trainers_on(me)
    }
    steps = transfers(before, plan.layout, regrouping)
    bytes_sent = merge(old, rank.trainers, steps, rank.groups, rank.flat_model)
    for id, trainer in rank.trainers.items():
        trainer.shard = rank.shards[id]
        if id not in regrouping.origins:
            continue
        trainer.workers = []
        for number in plan.layout.workers_on(me, id):
            origin = regrouping.origins[id][number]
            worker = workers[origin]
            worker.id = number
            worker.weights.copy_(trainer.anchor)
            if origin[0] in broken:  # its moments are no better than its anchor was
                worker.reset_optimizer()
            trainer.workers.append(worker)
    return bytes_sent


def _unite_shards(shards: dict[int, TrainerShard], regrouping: Regrouping, settings: Settings) -> None:
    for one in regrouping.merges:
        if settings.data.shards is Shards.disjoint:
            members: list[Any] = [shards[member] for member in sorted(one.shares)]  # all of one kind
            shards[one.survivor] = shards[one.survivor].united(members)
        for ended in one.ended:
            del shards[ended]


def _form_groups(groups: Groups, layout: Layout, runtime: Runtime) -> None:
    """Form the groups of the layout, each of which is tried.

    Raises:
        SettingsError: on all ranks, when some of them cannot exchange tensors.
    """
    runtime.heartbeat.enter("connecting ranks")
    error = None
    try:
        groups.form_all(layout.rank_sets)
    except GroupError as failure:
        remedy = "set cluster.interface (docs/network.md)"
        if runtime.backend is Backend.nccl:
            remedy = f"NCCL_DEBUG=INFO tells more; {remedy}, or cluster.backend=gloo"
        error = SettingsError(f"cluster.backend={runtime.backend.name}: {failure}; {remedy}")
    runtime.control.agree(error)
    runtime.heartbeat.enter("setting up the pool")


def _reserved_bytes(settings: Settings, groups: Groups, layout: Layout, rank: int) -> int:
    """GPU memory for the groups that merges may yet bring this rank."""
    merges = settings.merge.policy is not MergePolicy.none
    return groups.bytes_to_come(rank, len(layout.trainers)) if merges else 0


def _set_up_estimators(rank: Rank) -> None:
    if rank.settings.measures_gradients:
        rank.estimators = {id: new_estimator(rank.settings) for id in rank.trainers}


def _find_capacity(rank: Rank, layout: Layout) -> None:
    error = None
    if not _probe_in_turn(rank, layout):
        length = rank.settings.data.sequence_length
        remedy = "a smaller model" if rank.runtime.device.type == "cuda" else "a larger cluster.memory_bytes"
        error = SettingsError(
            f"data.sequence_length={length}: a pass of one sequence does not fit into memory beside the pool's "
            f"weights; use shorter sequences, fewer workers per rank or of them at once, or {remedy}"
        )
    rank.runtime.control.agree(error)


def _probe_in_turn(rank: Rank, layout: Layout, takes_part: bool = True) -> bool:
    """As `_probe`; ranks that share a GPU look at its free memory one after the other. Collective."""
    runtime, fits = rank.runtime, True
    for turn in range(runtime.num_turns):
        if takes_part and turn == runtime.turn:
            fits = _probe(rank, layout)
        if runtime.num_turns > 1:
            runtime.control.exchange({})
    return fits


def _probe(rank: Rank, layout: Layout) -> bool:
    """Find this rank's capacity; false where not even one sequence fits, which is tried all the same."""
    if not rank.trainers:
        return True
    settings, trainers = rank.settings, list(rank.trainers.values())
    most = max(
        largest_local_batch(settings.batching, layout.num_workers(trainer.id), trainer.shard.size)
        for trainer in trainers
    )
    reserved_bytes = _reserved_bytes(settings, rank.groups, layout, rank.runtime.rank)
    capacity = probe_capacity(rank.lanes, trainers, settings, most, rank.runtime.ranks_on_device, reserved_bytes)
    for lane in rank.lanes:
        lane.flat_model.capacity = None if capacity is None else max(1, capacity)
    return capacity is None or capacity >= 1

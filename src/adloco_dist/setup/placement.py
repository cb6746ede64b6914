"""What a rank works with: its share of the pool, set up before the first round and changed by every regrouping."""

from collections.abc import Sequence

from torch import nn

from adloco_dist.averaging.group import GroupError
from adloco_dist.baselines.ddp import DataParallelTrainer, data_parallel_slot
from adloco_dist.checkpoint.resume import ResumePoint
from adloco_dist.cluster.environment import Link
from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend, InnerOptimizer, MergePolicy, Settings, SettingsError, require
from adloco_dist.data.protocols import Cursor, Splits
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Network
from adloco_dist.policy.plan import PlanInputs, RoundPlan
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import smallest_capacity
from adloco_dist.pool.capacity import available_bytes, count_resident
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.local_pool import LocalPool, bytes_reserved_for_groups, probe_in_turn
from adloco_dist.pool.muon import working_bytes
from adloco_dist.pool.offload import Offload
from adloco_dist.pool.slot import new_slot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.setup.building import examine_module, require_matrices
from adloco_dist.setup.concurrency import find_slots
from adloco_dist.text import in_bytes


def set_up_pool(
    settings: Settings,
    runtime: Runtime,
    splits: Splits,
    objective: Objective,
    module: nn.Module,
    layout: Layout,
    resume_point: ResumePoint | None = None,
) -> LocalPool:
    """Set up this rank's share of the pool: every trainer that has a worker here, all from the same weights.

    Collective. `module` is what `build_module` returned. At a resume point data are dealt as they were; None: the run
    begins.

    Raises:
        SettingsError: on all ranks, when one of them cannot do what is asked, or not even one sequence fits on it.
    """
    groups = _connected_groups(settings, layout, runtime)  # first, because NCCL takes memory
    changing = examine_module(objective, module, settings, runtime)
    first = new_slot(objective, module, runtime.device, settings, changing)
    flat_model = first.flat_model
    num_tensors = len(flat_model.parameter_layout.names)
    if settings.inner.optimizer is InnerOptimizer.muon:
        _check_matrices(settings, runtime, objective, flat_model)
    fragments, rule = settings.wire.fragments, f"must be <= the {num_tensors} tensors that the model trains"
    require(fragments <= num_tensors, "wire.fragments", fragments, rule)
    initial_weights = flat_model.initial_weights()
    cursors = _cursors(settings, splits, layout, resume_point)
    seat = runtime.seat
    placed = layout.placed_on(seat)
    num_workers = sum(map(len, placed.values()))
    reserved_bytes = bytes_reserved_for_groups(settings, groups, layout, seat)
    resident = count_resident(first, settings, len(placed), num_workers, runtime.ranks_on_device, reserved_bytes)
    born_on = runtime.device if resident is None else "cpu"
    kind = DataParallelTrainer if settings.algorithm.is_data_parallel else Trainer
    trainers: dict[int, Trainer] = {}
    for trainer_id, workers in placed.items():
        instances = [
            Worker(worker, initial_weights.to(born_on, copy=True), flat_model, settings.inner, settings.wire)
            for worker in workers
        ]
        cursor = cursors[trainer_id]
        trainers[trainer_id] = kind(trainer_id, instances, initial_weights, flat_model, cursor, settings, runtime.nodes)
    offload = Offload(runtime.device, resident)
    pool = LocalPool(settings, runtime, splits, objective, groups, [first], offload, cursors, trainers)
    del initial_weights  # which workers and trainers have copies of
    offload.settle(pool.workers)
    recorded = resume_point.was_concurrent if resume_point else None
    pool.slots, pool.is_concurrent = find_slots(pool, layout, recorded)
    # Once everything that takes memory is there, and before a backward pass does more than compute.
    _find_capacity(pool, layout)
    if settings.algorithm.is_data_parallel:
        (trainer,) = trainers.values()
        pool.slots[0] = data_parallel_slot(pool.slots[0], trainer, groups.of(layout.ranks(trainer.id)))
    return pool


def _check_matrices(settings: Settings, runtime: Runtime, objective: Objective, flat_model: FlatModel) -> None:
    """Refuse a model without matrices for Muon, or with one that some rank has no memory for; raises a SettingsError on
    all ranks. Collective."""
    optimizer, hidden = settings.inner.optimizer, flat_model.hidden_matrices
    require_matrices(settings.inner, objective, hidden)
    needed, name = max((working_bytes(matrices), name) for name, matrices in hidden.items())
    memory = settings.cluster.memory_bytes
    with runtime.control.agreed():
        if memory is None or runtime.device.type != "cpu":
            memory = available_bytes(runtime.device, runtime.ranks_on_device)
        shape = list(hidden[name].shape)
        rule = f"its matrix {name} {shape} is orthogonalised in {in_bytes(needed)}, and there are {in_bytes(memory)}"
        require(needed <= memory, "inner.optimizer", optimizer, f"{objective.describe()}: {rule}; use inner=adamw")


def _cursors(settings: Settings, splits: Splits, layout: Layout, resume_point: ResumePoint | None) -> dict[int, Cursor]:
    """The cursors of all trainers, as they are dealt at first or as the checkpoint has them; raises a SettingsError
    where these are of another pool."""
    train, policy = splits.train, settings.data.shards
    if resume_point is None:
        dealt = train.deal(len(layout.trainers), layout.num_workers(0), policy, settings.seed)
        cursors = dict(enumerate(dealt))
    else:  # a run that resumes may have merged some of the trainers that it began with
        states = resume_point.state.shards
        try:
            cursors = dict(train.restore(states, settings.pool.trainers, policy, settings.seed))
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # on all ranks: all have the same state
            rule = f"its shards are not of this pool ({type(error).__name__}: {error}); move it away, or begin a run"
            raise SettingsError(f"run.directory={settings.run.directory}: its newest checkpoint: {rule}") from error
    return cursors


def backend_of_averages(settings: Settings, backend: Backend) -> Backend:
    """The backend of the groups that average, where seats' groups have `backend`.

    NCCL runs collectives of two groups at one time only if all ranks issue them in one order (docs/gpus.md). Ranks that
    hold a worker together gather its layers meanwhile, in another thread, and no two ranks come to the same order.
    """
    gathers_beside = settings.pool.ranks_per_worker > 1 and settings.wire.is_delayed
    return Backend.gloo if gathers_beside else backend


def find_plan_inputs(
    pool: LocalPool,
    layout: Layout,
    trajectory: Trajectory,
    links: Sequence[Link] = (),
    plans: Sequence[RoundPlan] = (),
) -> PlanInputs:
    """What the plans are decided from; batch limits follow from the capacities of a trainer's ranks. Collective."""
    replies = pool.runtime.control.exchange({"capacity": pool.flat_model.capacity})[:: pool.runtime.ranks_per_worker]
    limits = {
        trainer: smallest_capacity(replies[rank]["capacity"] for rank in layout.ranks(trainer))
        for trainer in layout.trainers
    }
    sizes = {trainer: cursor.size for trainer, cursor in pool.cursors.items() if cursor.size is not None}
    network = Network(pool.runtime.seat_nodes, {link.nodes: link.bytes_per_second for link in links})
    return PlanInputs(layout, sizes, limits, trajectory, network, pool.is_concurrent, plans)


def _connected_groups(settings: Settings, layout: Layout, runtime: Runtime) -> Groups:
    """Form the groups of the layout, and try each of them and the group of this rank's seat; raises a SettingsError on
    all ranks when some of them cannot exchange tensors, or there cannot be as many groups."""
    backend = backend_of_averages(settings, runtime.backend)
    size = settings.pool.ranks_per_worker
    groups = Groups(backend, settings.cluster.timeout_seconds, ranks_per_seat=size)
    merges = settings.merge.policy is not MergePolicy.none
    lacking = groups.lacking(layout.rank_sets, len(layout.trainers) - 1 if merges else 0)
    if settings.wire.is_delayed and lacking:
        raise SettingsError.of("wire.delay_updates", settings.wire.delay_updates, lacking)
    runtime.heartbeat.enter("connecting ranks")
    with runtime.control.agreed():
        try:
            if runtime.of_seat is not None:
                runtime.of_seat.connect()
            groups.form_all(layout.rank_sets)
        except GroupError as failure:
            remedy = "set cluster.interface (docs/guide/network.md)"
            if runtime.backend is Backend.nccl:
                remedy = f"NCCL_DEBUG=INFO logs more; {remedy}, or cluster.backend=gloo"
            raise SettingsError(f"cluster.backend={runtime.backend.name}: {failure}; {remedy}") from failure
    runtime.heartbeat.enter("setting up the pool")
    return groups


def _find_capacity(pool: LocalPool, layout: Layout) -> None:
    """Find how many sequences fit into a micro-batch; raises a SettingsError on all ranks when not even one fits on
    some rank."""
    with pool.runtime.control.agreed():
        if not probe_in_turn(pool, layout):
            remedy = "a smaller model" if pool.runtime.device.type == "cuda" else "a larger cluster.memory_bytes"
            rule = (
                "a micro-batch of one sequence does not fit into memory beside the pool's weights; use shorter "
                f"sequences, fewer workers per rank or of them concurrently, or {remedy}"
            )
            raise SettingsError.of("data.sequence_length", pool.settings.data.sequence_length, rule)

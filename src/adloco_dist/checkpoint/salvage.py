"""What ranks are left with when others are lost in the middle of a round, as a checkpoint from which all go on.

Nobody loses an update that it took. Where a rank that is left has completed an average, the others of the trainer take
its step; an average that nobody has completed is taken again, or the next one has what it would have brought. Workers
of ranks that are gone start again from their trainer's anchor, and take part from the next average on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adloco_dist.averaging.meeting import catch_up
from adloco_dist.checkpoint.files import CHECKPOINTS_DIRECTORY, RECORDS_FILE, STATE_FILE, number_in
from adloco_dist.checkpoint.search import ReportLine, find
from adloco_dist.checkpoint.state import RunState
from adloco_dist.checkpoint.storage import StorageDomains, domains_of
from adloco_dist.checkpoint.writer import CheckpointWriter, parts, schema_of
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.messages import decode, encode
from adloco_dist.policy.plan import CheckpointId, RoundPlan
from adloco_dist.policy.report import MergeReport
from adloco_dist.policy.survivors import Recovery, Remains, Share, without_lost
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.run.journal import Journal
from adloco_dist.run.rows import METRICS_FILE


@dataclass(frozen=True)
class Left:
    """What a rank is left with."""

    pool: LocalPool
    """It stands in a round."""
    journal: Journal
    directory: Path
    generation: int
    """Number of the generation of ranks among whom others were lost."""
    has_records: bool
    """Whether it was the one that keeps them."""

    def remains(self) -> Remains:
        """The same in plain values; averages under way are given up."""
        standing = self.pool.standing
        assert standing
        shares = {}
        for number, trainer in self.pool.trainers.items():
            trainer.abandon()
            if not trainer.is_torn:
                workers = [worker.id for worker in trainer.workers]
                shares[number] = Share(trainer.steps, trainer.checksum(), workers)
        return Remains(
            generation=self.generation,
            round=standing.plan.round,
            next_event=standing.next_event,
            trainers=shares,
            merge=standing.merge,
            found=standing.found,
            seconds=standing.seconds,
            has_records=self.has_records,
        )


def salvage(
    runtime: Runtime, settings: Settings, left: Left | None, report_line: ReportLine, is_fitted: bool = False
) -> None:
    """Write what ranks are left with, if anything, as a checkpoint. Collective.

    Args:
        left: None: this rank has just begun.
        report_line: takes lines for the user.
        is_fitted: whether workers that are lost end with the round; else they are placed again.
    """
    control, directory = runtime.control, settings.run.directory
    replies = control.exchange(encode(left.remains() if left else Remains()))
    recovery = Recovery.of([decode(Remains, reply) for reply in replies], runtime.ranks_per_worker)
    if recovery is None or directory is None:
        return
    left = left if runtime.rank in recovery.remains else None
    is_furthest = runtime.rank == recovery.furthest
    said = control.exchange(_said(left) if left and is_furthest else {})[recovery.furthest]
    plan, next_event = decode(RoundPlan, said["plan"]), recovery.remains[recovery.furthest].next_event
    recovery = recovery.following(plan)
    layout = recovery.held(plan) if is_fitted else recovery.layout(plan, runtime.seat_nodes, settings.pool.placement)
    leaving = {trainer: recovery.lost(plan, trainer) for trainer in layout.trainers} if is_fitted else {}
    if left:
        left.pool.runtime = runtime
        _stand_together(left.pool, recovery, plan, next_event)
    folder = Path(directory) / CHECKPOINTS_DIRECTORY
    with domains_of(runtime, folder, settings.checkpoint) as domains:
        newest = max((number_in(path.name) or 0 for path in folder.iterdir()), default=0)
        number = 1 + max(reply["number"] for reply in control.exchange({"number": newest}))
        seconds = max(one.seconds for one in recovery.remains.values())
        checkpoint_id = CheckpointId(number, plan.round, plan.pool_tokens, seconds)
        contents, journal = _records(runtime, domains, recovery, left, report_line)
        message: dict[str, str] = {}
        if left and is_furthest:
            remains = recovery.remains.values()
            state = RunState(
                settings=flatten(to_plain(settings)),
                schema=schema_of(left.pool, is_away=True),
                corpus=left.pool.splits.digest,
                world_size=runtime.num_seats,
                plan=replace(without_lost(plan, layout, leaving), last_checkpoint=checkpoint_id),
                next_event=next_event,
                has_begun=True,
                merge=sum((one.merge for one in remains), MergeReport()),
                pool=next((one.found for one in remains if one.found), None),
                seconds=seconds,
                shards={trainer: said["cursors"][str(trainer)] for trainer in layout.trainers},
                journal=journal,
            ).placed_on(runtime.seat_nodes, settings.pool.placement, is_same=False)
            message = {"state": json.dumps(state.to_message())}
        # On every volume, as any of them may be lost before the next checkpoint.
        state_file = control.exchange(message)[recovery.furthest]["state"].encode()
        if runtime.rank == domains.volume:
            contents[STATE_FILE] = state_file
        held = parts(left.pool, recovery.held(plan), is_away=True, of_each_volume=domains.of_rank) if left else {}
        # What a node has others have, too, or it is lost with it: all of them would wait for copies.
        without_copies = replace(settings.checkpoint, copies=False)
        writer = CheckpointWriter(domains, runtime.store, runtime.world_size, without_copies, report_line)
        writer.begin(checkpoint_id, held, contents)
        writer.wait()
        control.exchange({})  # the manifest is there


def _said(left: Left) -> dict[str, Any]:
    """What the others follow of the rank that has come furthest."""
    standing, pool = left.pool.standing, left.pool
    assert standing
    cursors = standing.cursors
    if standing.next_event > len(standing.plan.events):
        cursors = {trainer: cursor.state_dict() for trainer, cursor in pool.cursors.items()}
    return {"plan": encode(standing.plan), "cursors": cursors}


def _stand_together(pool: LocalPool, recovery: Recovery, plan: RoundPlan, next_event: int) -> None:
    """Let this rank's trainers stand where they are followed, and begin again what is lost of them."""
    rank, standing = pool.runtime.rank, pool.standing
    assert standing
    usable = set(recovery.trainers(plan)) & set(recovery.remains[rank].trainers)
    pool.trainers = {number: trainer for number, trainer in pool.trainers.items() if number in usable}
    for number in recovery.trainers(plan):
        for leader, follower in recovery.behind(number):
            if rank in (leader, follower):
                steps = recovery.remains[leader].trainers[number].steps
                _bring(pool.trainers[number], steps, leader, follower, is_leader=rank == leader)
    if standing.plan.round < plan.round:
        for worker in pool.workers:
            worker.begin_round(pool.settings.inner.reset_each_round)
    for number, trainer in pool.trainers.items():
        if rank in recovery.leaders(number):
            for worker in recovery.lost(plan, number):
                trainer.workers.append(_anew(pool, trainer, worker, plan.updates_before(next_event, number, worker)))


def _bring(trainer: Trainer, steps: int, leader: int, follower: int, is_leader: bool) -> None:
    """Bring a trainer's anchor, and what belongs to it, from one rank to another, whose workers take the step that they
    have missed."""
    vectors = [*trainer.outer_vectors, *([] if trainer.mean_anchor is None else [trainer.mean_anchor])]
    for vector in vectors:
        if is_leader:
            dist.send(vector.cpu(), follower)
        else:
            arrived = torch.empty_like(vector, device="cpu")
            dist.recv(arrived, leader)
            vector.copy_(arrived)
    if is_leader:
        return
    if trainer.residual is not None:  # it was sent, or belongs to another anchor
        trainer.residual.zero_()
    if trainer.steps < steps:
        catch_up(trainer)
        trainer.restart_buffers()
        trainer.steps = steps


def _anew(pool: LocalPool, trainer: Trainer, number: int, updates_done: int) -> Worker:
    """A worker that begins again from its trainer's anchor; it is left out of the next average."""
    settings = pool.settings
    worker = Worker(number, trainer.anchor.detach().cpu().clone(), pool.flat_model, settings.inner, settings.wire)
    worker.begin_again(trainer.anchor, updates_done)
    return worker


def _records(
    runtime: Runtime, domains: StorageDomains, recovery: Recovery, left: Left | None, report_line: ReportLine
) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """The records as a file of the checkpoint, on the rank that writes them where nodes have directories of their own;
    and on the rank that has come furthest, where they stand. Collective.

    Where the node is lost that kept them, they are those of the newest checkpoint.
    """
    keeper = next((rank for rank, one in recovery.remains.items() if one.has_records), None)
    if keeper is not None:
        is_keeper = left is not None and runtime.rank == keeper
        known = runtime.control.exchange({"journal": left.journal.state()} if left and is_keeper else {})
        journal, content = known[keeper]["journal"], None
        if left and is_keeper and domains.buddy is not None:
            content = (left.directory / METRICS_FILE).read_bytes()
        return {RECORDS_FILE: content} if content is not None else {}, journal
    before = find(runtime.control, domains, report_line, may_lack=True)
    if before is None:
        return {}, {}
    reader, state = before
    report_line(f"the records of rounds after {state.plan.round} are lost with the node that kept them")
    content = reader.records() if runtime.rank == recovery.furthest else None
    return {RECORDS_FILE: content} if content is not None else {}, state.journal

"""Ranks that are left go on in their processes, and newcomers take part: `DiLoCo.regroup`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco_dist import DiLoCo, OuterSGD, PeerLostError, Wire
from adloco_dist.averaging.averager import Averager, Commit, FullPrecision
from adloco_dist.averaging.codecs import Signs, WholeNumbers
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, STREAMING, Tied, adamw, batch, on_ranks, update, values

UPDATES = 4
GONE = "Connection closed by peer"


def group(ranks: list[int]) -> Any:
    """A process group; collective over all ranks."""
    return dist.new_group(ranks)


class Breaking:
    """An averager one of whose exchanges fails: before the others have what they wait for, or after that."""

    def __init__(self, averager: Averager, breaks: str | None, number: int = 2) -> None:
        self._averager, self.keeps_residual = averager, averager.keeps_residual
        self._breaks, self._left = breaks, number

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        self._left -= 1
        breaks = self._breaks if self._left == 0 else None
        if breaks == "before":
            dist.destroy_process_group(group.process_group)
            raise RuntimeError(GONE)
        commit = self._averager.exchange(payload, num_exact, group, residual)
        if breaks == "after":
            raise RuntimeError(GONE)
        return commit

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        return self._averager.bytes_per_rank(num_elements, num_exact, ranks)


def train_and_lose(runtime: Runtime, wire: Wire, averager: Averager, when: str, outer: OuterSGD) -> dict[str, Any]:
    """Three ranks, of which the last goes in the second average: before it has been exchanged, or after ranks 0 and 2
    have completed it, and rank 1 has not. What the survivors' weights are before they regroup, and afterwards."""
    module = Tied()
    optimizers = adamw(module)
    breaks = when if runtime.rank == {"before": 2, "after": 1}[when] else None
    wire = Wire(Breaking(averager, breaks), wire.fragments, wire.delay_updates)
    found: dict[str, Any] = {}
    with DiLoCo(module, optimizers, UPDATES, outer, wire=wire, timeout_seconds=30) as diloco:
        number = 0
        while diloco.round < 4:
            number += 1
            try:
                update(module, optimizers, batch(runtime.rank, number))
                if number == 2 * UPDATES:
                    found["departed"] = values(module)
            except PeerLostError as error:
                both = group([0, 1])
                if runtime.rank == 2:
                    return found
                found |= {"error": str(error), "left": values(module)}
                found["anchor before"] = torch.cat(
                    [value.flatten() for value in diloco.state_dict()["anchor"].values()]
                )
                optimizers[0].zero_grad()
                diloco.regroup(both)
                found |= {"regrouped": values(module), "round": diloco.round, "is apart": not diloco.holds_anchor}
        diloco.outer_step()
    return {**found, "last": values(module), "state": diloco.state_dict()}


AVERAGERS = {
    "fp32": FullPrecision(), "int4": Quantized(WholeNumbers(4)), "signs": Quantized(Signs(), keeps_residual=True),
    "sparse": Sparse(0.1),
}  # fmt: skip


@pytest.mark.parametrize("averager", AVERAGERS)
@pytest.mark.parametrize("wire", STREAMING)
@pytest.mark.parametrize("when", ["before", "after"])
def test_those_who_are_left_go_on(wire: str, averager: str, when: str) -> None:
    outer = PLAIN if AVERAGERS[averager].keeps_residual else OuterSGD()
    first, second, _ = on_ranks(train_and_lose, 3, STREAMING[wire], AVERAGERS[averager], when, outer)
    for name in ("regrouped", "last"):
        assert torch.equal(first[name], second[name]), name
    assert first["round"] == second["round"]
    assert not first["is apart"]
    assert not second["is apart"]
    for name, value in first["state"]["anchor"].items():
        assert torch.equal(value, second["state"]["anchor"][name])
    assert first["state"]["steps"] == second["state"]["steps"]
    assert "regroup those that are left" in first["error"]


def trained(flat: torch.Tensor) -> torch.Tensor:
    """Of all parameters of `Tied` those that are trained: all behind its embedding."""
    return flat[11 * 8 :]


@pytest.mark.parametrize("wire", STREAMING)
def test_nothing_that_the_rest_have_learned_is_lost(wire: str) -> None:
    first, second, _ = on_ranks(train_and_lose, 3, STREAMING[wire], FullPrecision(), "before", PLAIN)
    torch.testing.assert_close(first["regrouped"], (first["left"] + second["left"]) / 2)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_rank_that_has_missed_an_average_takes_its_step_and_keeps_what_it_has_learned_since(is_delayed: bool) -> None:
    wire = STREAMING["delayed" if is_delayed else "plain"]
    first, second, _ = on_ranks(train_and_lose, 3, wire, FullPrecision(), "after", PLAIN)
    if not is_delayed:  # all that the second rank has learned is in the average that it has missed
        torch.testing.assert_close(first["regrouped"], first["left"])
        return
    rejoined = first["anchor before"] + trained(second["left"] - second["departed"])
    torch.testing.assert_close(trained(first["regrouped"]), (trained(first["left"]) + rejoined) / 2)


def join(runtime: Runtime, updates_per_round: int) -> dict[str, Any]:
    """Two ranks train; in the middle of a round a third one joins them, which may have another number of updates."""
    module = Tied()
    optimizers = adamw(module)
    both = group([0, 1])
    found: dict[str, Any] = {}
    with torch.no_grad():
        module.head.bias.add_(runtime.rank)
    if runtime.rank < 2:
        diloco = DiLoCo(module, optimizers, UPDATES, group=both)
        for number in range(2 * UPDATES + 2):
            update(module, optimizers, batch(runtime.rank, number))
            diloco.count_update()
        found["left"] = values(module)
        try:
            diloco.regroup()
        except ValueError as error:
            diloco.regroup(both)
            found["refused"] = str(error)
    else:
        try:
            diloco = DiLoCo(module, optimizers, updates_per_round)
        except ValueError as error:
            return {"refused": str(error)}
    found |= {"joined": values(module), "round": diloco.round}
    for number in range(2 * UPDATES):
        update(module, optimizers, batch(runtime.rank, 100 + number))
        diloco.count_update()
    return {**found, "last": values(module), "state": diloco.state_dict()}


def test_a_newcomer_gets_all_that_the_others_have() -> None:
    first, second, newcomer = on_ranks(join, 3, UPDATES)
    for rank in (second, newcomer):
        assert torch.equal(rank["joined"], first["joined"])
        assert torch.equal(rank["last"], first["last"])
        assert (rank["round"], rank["state"]["round"], rank["state"]["steps"]) == (3, 5, 5)
        for part in ("anchor", "momentum"):
            for name, value in first["state"][part].items():
                assert torch.equal(value, rank["state"][part][name]), (part, name)
    # It has learned nothing that counts: the third step is that of the other two.
    assert not torch.allclose(first["left"], second["left"])
    assert not torch.allclose(first["joined"], first["left"])


def test_a_newcomer_with_other_settings_is_refused_and_the_others_go_on() -> None:
    first, second, newcomer = on_ranks(join, 3, UPDATES + 1)
    assert first["refused"] == second["refused"] == newcomer["refused"]
    assert first["refused"].startswith("updates_per_round differs between ranks: 4 on ranks {0,1}, 5 on rank 2; start")
    assert torch.equal(first["last"], second["last"])


def lose_another(runtime: Runtime) -> torch.Tensor:
    """Three ranks; one goes in the second round, another while the rest regroup, and the last goes on alone."""
    module = Tied()
    optimizers = adamw(module)
    breaking = Breaking(FullPrecision(), "before" if runtime.rank else None, number=4 - runtime.rank)
    pairs = [group([0, 1]), group([0])]
    diloco = DiLoCo(module, optimizers, UPDATES, PLAIN, wire=Wire(breaking))
    for number in range(UPDATES):
        update(module, optimizers, batch(runtime.rank, number))
        diloco.count_update()
    for number in range(UPDATES):
        update(module, optimizers, batch(runtime.rank, 10 + number))
        if number == UPDATES - 1:
            with pytest.raises(PeerLostError):
                diloco.count_update()
        else:
            diloco.count_update()
    left = values(module)
    if runtime.rank == 2:
        return left
    with pytest.raises(PeerLostError):
        diloco.regroup(pairs[0])
    if runtime.rank == 0:
        diloco.regroup(pairs[1])
        torch.testing.assert_close(values(module), left)
        diloco.outer_step()
    return left


def test_one_more_rank_may_go_while_the_others_regroup() -> None:
    on_ranks(lose_another, 3)

"""What a dry run predicts, counted by hand."""

from dataclasses import dataclass
from typing import Any

import pytest

from adloco_dist.cluster.environment import Link
from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.protocols import Splits
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.protocol import Objective, ParameterCount
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.setup.dry_run import print_dry_run
from adloco_dist.setup.parts import NamedParts
from adloco_dist.setup.scale import FLOPS_PER_SECOND, Traffic, predictions
from helpers.support import small_splits

PARAMETERS = 2048
BLOCK_BYTES = 128 + 2
"""Of 128 numbers as int8, with their scale."""


@dataclass(frozen=True)
class MarkovParts(NamedParts):
    """The settings' model on a text of a few thousand tokens."""

    def splits(self, settings: Settings) -> Splits:
        return small_splits()

    def objective(self, settings: Settings, splits: Any, reads_weights: bool = True) -> Objective:
        return LanguageObjective.fitted(settings, splits.vocabulary)


SMALL = ("algorithm=diloco", "model=nano", "data.sequence_length=12", "batching.local_batch=2")


def rows(shown: str, title: str) -> list[list[str]]:
    """The cells of a printed table, row by row."""
    found = []
    for line in shown[shown.index(title) :].splitlines():
        if line.startswith("└"):
            break
        if line.startswith("│"):
            found.append([cell.strip() for cell in line.strip("│").split("│")])
    return found


def planned(capsys: pytest.CaptureFixture[str], nodes: list[int], *overrides: str, **measured: Any) -> str:
    print_dry_run(compose([*SMALL, *overrides]), nodes, MarkovParts(), **measured)
    return capsys.readouterr().out


def traffic(nodes: list[int], *overrides: str) -> Traffic:
    return Traffic(compose(["algorithm=diloco", *overrides]), PARAMETERS, nodes)


def test_bytes_of_whole_models() -> None:
    """Two ranks on each of two nodes: a ring of four, and one of two between nodes; a count travels with the sums."""
    sent, payload = traffic([0, 0, 1, 1]), 4 * (PARAMETERS + 1)
    assert sent.of_rank([0, 1, 2, 3]) == 2 * 3 * payload // 4
    assert sent.over_link([0, 1, 2, 3]) == payload
    assert sent.inside([0, 1, 2, 3]) == 2 * sent.of_rank([0, 1, 2, 3]) - payload, "of both ranks of a node"
    assert sent.over_link([2, 3]) == 0, "one node"


def test_ranks_of_a_seat_send_their_parts_and_a_node_sends_whole_models() -> None:
    sent = traffic([0] * 8 + [1] * 8, "pool.ranks_per_worker=8")
    assert sent.of_rank([0, 1]) == 4 * (PARAMETERS // 8 + 1)
    assert sent.over_link([0, 1]) == 8 * sent.of_rank([0, 1])


def test_parts_are_summed_inside_of_nodes_first() -> None:
    """Two seats of two ranks on each of two nodes: ranks 0, 2, 4 and 6 hold the same half of the model."""
    sent = traffic([0] * 4 + [1] * 4, "pool.ranks_per_worker=2", "wire=int8")
    inside = 4 * 512 * 2  # half of the part, to the neighbour and its sum back
    between = 2 * 2 * BLOCK_BYTES  # a quarter of the part, there and back
    assert sent.of_rank([0, 1, 2, 3]) == inside + between + 2 * 3 * 4 // 4
    assert sent.over_link([0, 1, 2, 3]) == 2 * (2 * 4 * BLOCK_BYTES + 4)
    assert sent.inside([0, 1, 2, 3]) == 4 * inside + 16, "and counts"


def test_slices_of_many_nodes_go_to_their_owners_and_their_sums_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four, each sends three quarters of all signs, and its quarter of the sum to three: no more than of two."""
    two, four = (
        traffic(list(range(nodes)), "wire=signs", "outer=average").of_rank(list(range(nodes))) for nodes in (2, 4)
    )
    signs = PARAMETERS / 8 + 2 * PARAMETERS / 128  # with a scale of 2 bytes for each 128
    assert two == pytest.approx(signs, rel=0.05)
    assert four == pytest.approx(2 * 3 / 4 * signs, rel=0.05)
    table = rows(planned(capsys, [0, 1, 2, 3], "algorithm=adloco"), "trainers")
    (row,) = [row for row in table if row[0] == "0"]
    in_signs, in_four_bits = map(float, row[-1].split(" or "))
    assert in_four_bits == pytest.approx(in_signs * 4.125 / 1.125, rel=0.1), "as the link will allow"


def test_trainers_share_the_link_of_a_node() -> None:
    settings = compose(["algorithm=diloco", "pool.trainers=2", "pool.placement=spread"])
    nodes = [0, 0, 1, 1]
    sent = Traffic(settings, PARAMETERS, nodes)
    assert sent.over_fullest_link(experiment_layout(settings, nodes)) == 2 * sent.over_link([0, 2])
    packed = compose(["algorithm=diloco", "pool.trainers=2"])
    assert sent.over_fullest_link(experiment_layout(packed, nodes)) == 0


def test_tables_of_whole_models(capsys: pytest.CaptureFixture[str]) -> None:
    shown = planned(capsys, [0, 0, 1])
    (trainer,) = rows(shown, "trainers")
    assert trainer[:5] == ["0", "0 1 2", "2", "{0-2}", "6"]
    memory = rows(shown, "memory of each rank in MB")
    assert [row[:3] for row in memory] == [["0-2", "0,1", "1"]], "ranks that hold as much are in one row"
    assert "predicted: " not in shown, "a model that is too small for it"


def test_tables_of_models_that_ranks_hold_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are of seats, and everything but the layout is an eighth of what one rank would have."""
    together, whole = (
        planned(
            capsys,
            [0] * size + [1] * size,
            f"pool.ranks_per_worker={size}",
            "model=small",
            links=[Link((0, 1), 0, 1e6)],
        )
        for size in (8, 1)
    )
    (trainer,), (alone,) = rows(together, "trainers"), rows(whole, "trainers")
    assert trainer[:5] == ["0", "0-7 8-15", "2", "{0,8} to {7,15}", "4"]
    assert float(trainer[5]) == pytest.approx(float(alone[5]) / 8, abs=0.01)
    memory, of_whole = rows(together, "memory of each rank"), rows(whole, "memory of each rank")
    assert [row[:3] for row in memory] == [["0-15", "0,1", "1"]]
    for row, others in zip(memory, of_whole, strict=True):
        assert [float(cell) for cell in row[3:]] == pytest.approx([float(cell) / 8 for cell in others[3:]], abs=0.1)
    links, of_link = (rows(shown, "share of a round") for shown in (together, whole))
    assert [row[0] for row in links] == ["0-15"]
    assert [row[1:] for row in links] == [row[1:] for row in of_link], "a node sends a whole model either way"


FROZEN = ("d_model=64", "max_position_embeddings=8192")
"""Sinusoids of a Pegasus."""


def test_frozen_parameters_are_held_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("model=causal", "model.architecture=pegasus", *(f"+model.overrides.{field}" for field in FROZEN))
    shown = planned(capsys, [0] * 8, "pool.ranks_per_worker=8", *shape)
    assert f"frozen: {8192 * 64:,} more parameters, 0.3 MB on every rank" in shown


def test_ranks_that_seats_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"pool\.ranks_per_worker=3: 8 ranks are no multiple of it; start 9"):
        print_dry_run(compose([*SMALL, "pool.ranks_per_worker=3"]), [0] * 8, MarkovParts())


LARGE_MODEL = ParameterCount(8 * 10**9, 0)
SEATS_OF_EIGHT = (
    "pool.ranks_per_worker=8", "batching.local_batch=12", "data.sequence_length=1024", "algorithm=diloco",
)  # fmt: skip


def test_rounds_on_other_clusters() -> None:
    """A worker on each node of eight ranks; the rank with the most has 2 of the 12 sequences."""
    found = {row.num_nodes: row for row in predictions(compose(SEATS_OF_EIGHT), LARGE_MODEL, 8)}
    assert list(found) == [2, 4, 8, 16, 32, 64]
    update = 6 * 8e9 * 2 * 1024 / FLOPS_PER_SECOND
    for nodes, row in found.items():
        num_bytes = 2 * (nodes - 1) / nodes * 4 * 8e9
        assert row.num_workers == nodes
        assert row.link_bytes == pytest.approx(num_bytes)
        seconds, updates = row.rounds["1 Gbit/s"]
        assert seconds == pytest.approx(8 * num_bytes / 1e9)
        assert updates == pytest.approx(19 * seconds / update, abs=1)
        assert row.rounds["100 Gbit/s"][0] == pytest.approx(seconds / 100)


def test_numbers_of_nodes_that_would_leave_ranks_idle_are_left_out() -> None:
    """With four workers in all: on two nodes each has two, which take turns, so a round has twice the updates."""
    found = predictions(compose([*SEATS_OF_EIGHT, "pool.workers_per_trainer=4"]), LARGE_MODEL, 8)
    assert [row.num_nodes for row in found] == [2, 4]
    (seconds, updates), (more_seconds, more_updates) = (row.rounds["1 Gbit/s"] for row in found)
    assert more_seconds / seconds == pytest.approx(1.5)
    assert more_updates / updates == pytest.approx(2 * 1.5, rel=0.01)

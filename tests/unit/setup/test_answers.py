"""What a dry run answers, by hand."""

import re
from types import SimpleNamespace

import psutil
import pytest
import torch

from adloco_dist.cluster.environment import Link
from adloco_dist.config.compose import compose
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.setup import answers
from adloco_dist.setup.answers import H100_BYTES
from adloco_dist.text import in_bytes

SEVEN_BILLION, SMALL = ParameterCount(7 * 10**9, 0), ParameterCount(10**6, 0)
DILOCO = ("algorithm=diloco", "outer=average", "checkpoint.every=null")
"""Weights, two moments, an anchor and the gradient: five vectors in fp32."""


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def told(parameters: ParameterCount, nodes: list[int], *overrides: str, links: tuple[Link, ...] = ()) -> dict[str, str]:
    settings = compose([*DILOCO, *overrides])
    lines = answers.answers(settings, nodes, experiment_layout(settings, nodes), parameters, links)
    return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}


def test_a_model_that_no_gpu_takes_names_how_many_must_share_it() -> None:
    memory = told(SEVEN_BILLION, [0] * 8 + [1] * 8)["memory"]
    assert memory.startswith(f"it does not fit: each rank holds {in_bytes(5 * 4 * 7e9)}, activations not counted (")
    assert f"an H100 has {in_bytes(H100_BYTES)})" in memory
    assert memory.endswith(f"set pool.ranks_per_worker=4, with which it is {in_bytes(5 * 7e9)}"), "of 1, 2, 4 and 8"


def test_what_a_node_holds_beside_its_gpus_is_that_of_the_ranks_that_must_share_it() -> None:
    memory = told(SEVEN_BILLION, [0] * 8 + [1] * 8, "checkpoint.every=10rounds")["memory"]
    held = f"a node holds {in_bytes(2 * 4 * 4 * 7e9)} more, which must be free there"
    assert memory.endswith(held), "four vectors of each of two workers"
    assert memory.count("on the CPU") == 1


def test_a_small_model_for_which_this_machine_is_too_small_is_shared_out_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU, copies for checkpoints are in the same memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4 * 20e6))
    memory = told(SMALL, [0, 0, 0, 0], "checkpoint.every=10rounds")["memory"]
    held = (5 + 4) * 4e6
    assert memory.startswith(f"it does not fit: each rank holds {in_bytes(held)}, ")
    assert memory.endswith(f"set pool.ranks_per_worker=4, with which it is {in_bytes(held / 4)}"), "half is too much"


def test_a_model_that_as_many_ranks_share_fits() -> None:
    memory = told(SEVEN_BILLION, [0] * 8 + [1] * 8, "pool.ranks_per_worker=4")["memory"]
    assert memory.startswith(f"it fits: each rank holds {in_bytes(5 * 7e9)}, ")
    more = told(ParameterCount(10**12, 0), [0] * 8)["memory"]
    assert more.endswith("it needs nodes with more or larger devices, or a smaller model")


def test_copies_for_checkpoints_are_counted_on_the_cpu() -> None:
    settings = ("pool.ranks_per_worker=4", "checkpoint.every=10rounds")
    memory = told(SEVEN_BILLION, [0] * 8 + [1] * 8, *settings)["memory"]
    held = f"; on the CPU, a node holds {in_bytes(8 * 4 * 7e9)} more, which must be free there"
    assert memory.endswith(held), "four vectors of two workers"


def test_a_node_whose_cpu_has_no_room_for_copies_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with GPUs, whose memory is known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=H100_BYTES))
    settings, held = ("pool.ranks_per_worker=4", "checkpoint.every=10rounds"), 8 * 4 * 7e9
    for share, verdict in ((0.9, "it fits on devices, but not on a node's CPU: "), (0.7, "it fits: ")):
        monkeypatch.setattr(psutil, "virtual_memory", lambda share=share: SimpleNamespace(total=held / share))
        memory = told(SEVEN_BILLION, [0] * 8 + [1] * 8, *settings)["memory"]
        assert memory.startswith(verdict)
        assert f"a node holds {in_bytes(held)} more (this machine has {in_bytes(held / share)})" in memory


def test_a_small_model_shares_this_machine() -> None:
    memory = told(SMALL, [0, 0])["memory"]
    share = in_bytes(psutil.virtual_memory().total / 2)
    held = f"it fits: each rank holds {in_bytes(5 * 4e6)}, activations not counted"
    assert memory == f"{held} (its part of this machine is {share})"


def test_on_one_node_there_is_no_link_to_ask_about() -> None:
    assert told(SMALL, [0, 0]).keys() == {"memory"}


def test_links_that_are_enough_and_that_are_too_slow() -> None:
    fixed = told(SEVEN_BILLION, [0, 1], "algorithm.updates_per_round=1000", "wire=fp32")["link"]
    assert fixed.startswith(f"each node sends {in_bytes(4 * 7e9)} to the others in a round; enough for 95% ")
    enough, slow = fixed.split("; too slow with H up to 1,000: ")
    assert "100 Gbit/s" in enough and "100 Mbit/s (" in slow
    fixed_pace, good = ("algorithm.updates_per_round=10", "wire=fp32"), "; enough for 95% of the time in updates: "
    measured = told(SMALL, [0, 1], *fixed_pace, links=(Link((0, 1), 0.0, 4e6),))["link"]
    assert measured.partition(good)[2] == "the measured links if they take 2 s or more"
    line = told(SMALL, [0, 1], *fixed_pace)["link"].partition(good)[2]  # 4 MB in a round of 10
    lengths = {name: float(seconds) for name, seconds in re.findall(r"(\d+ .bit/s) if they take ([\d.]+) s", line)}
    assert lengths["10 Mbit/s"] > 6 and lengths["100 Mbit/s"] > 0.6 and lengths["1 Gbit/s"] > 0.06
    assert [*lengths.values()] == sorted(lengths.values(), reverse=True)


def test_an_algorithm_that_averages_every_update_is_judged_by_its_updates() -> None:
    ddp = told(SMALL, [0, 0, 1, 1], "algorithm=ddp")
    assert ddp.keys() == {"memory", "link"}, "without rounds nothing drifts"
    assert " of averages between its own ranks; enough for 95% of the time in updates: " in ddp["link"]
    assert "10 Gbit/s if they take " in ddp["link"]


def test_what_travels_inside_of_nodes_stands_beside_what_leaves_them() -> None:
    inside = told(SMALL, [0, 0, 1, 1], "wire=fp32")["link"]
    assert f" to the others in a round, and up to {in_bytes(8e6)} of averages between its own ranks" in inside
    assert "between its own" not in told(SMALL, [0, 1])["link"]


def test_what_is_gained_by_links_that_were_measured_or_assumed() -> None:
    assumed = told(SEVEN_BILLION, [0, 1], "algorithm.updates_per_round=200")["gain"]
    start = "the progress of 2 workers over that of one is at most "
    assert assumed.startswith(start)
    gains = [float(part.split()[0]) for part in assumed.removeprefix(start).partition(" (")[0].split(", ")]
    assert gains == sorted(gains), "more on faster links"
    assert "gain" not in told(SMALL, [0, 1])
    assert "on 100 Mbit/s" in assumed
    measured = told(SMALL, [0, 1], links=(Link((0, 1), 0.001, 1e6),))["gain"]
    assert "with updates of 0.01 s" in measured and "with updates of 10 s" in measured


def test_link_and_gain_are_those_of_the_ranks_that_must_share_it() -> None:
    nodes = [0] * 8 + [1] * 8
    asked, proposed = told(SEVEN_BILLION, nodes), told(SEVEN_BILLION, nodes, "pool.ranks_per_worker=4")
    assert {name for name in asked if name != "memory"} == {
        "link, with pool.ranks_per_worker=4",
        "gain, with pool.ranks_per_worker=4",
        "tables",
    }
    for name in ("link", "gain"):
        assert asked[f"{name}, with pool.ranks_per_worker=4"] == proposed[name]


def test_what_is_gained_is_over_all_that_one_node_has() -> None:
    gain = told(SEVEN_BILLION, [0] * 8 + [1] * 8, "pool.ranks_per_worker=4", "algorithm.updates_per_round=500")["gain"]
    start = "the progress of 4 workers over that of 2 on one node is at most "
    assert gain.startswith(start)
    assert all(float(part.split()[0]) <= 2 for part in gain.removeprefix(start).partition(" (")[0].split(", "))

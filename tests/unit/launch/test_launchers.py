"""What other launchers have left in the environment, as this process finds it."""

import itertools

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.launch.launchers import OTHERS, PLACES, is_torchrun_rank, refuse_other_launchers, speaks_for_node

pytestmark = pytest.mark.stranger
RANK = {
    "TORCHELASTIC_RUN_ID": "job", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, *OTHERS, *OTHERS.values(), "TORCHELASTIC_ERROR_FILE", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def left(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_rank_of_torchruns_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_torchrun_rank()
    left(monkeypatch, RANK)
    assert is_torchrun_rank()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_ADDR", None),
        ("MASTER_ADDR", ""),
        *itertools.product((*PLACES, *PLACES.values(), "MASTER_PORT"), (None, "", "one", "-1", "1.5")),
    ],
)
def test_a_part_of_what_torchrun_gives_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    left(monkeypatch, {**RANK, name: value or ""})
    if value is None:
        monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match="unset TORCHELASTIC_RUN_ID") as refused:
        is_torchrun_rank()
    assert (f"{name}={value} is no number" if value else f"{name} is missing") in str(refused.value)


@pytest.mark.parametrize(("place", "size"), PLACES.items())
def test_a_rank_beyond_its_world_is_refused(monkeypatch: pytest.MonkeyPatch, place: str, size: str) -> None:
    left(monkeypatch, {**RANK, place: RANK[size]})
    with pytest.raises(SettingsError, match=f"{place}={RANK[size]} is not below {size}={RANK[size]}"):
        is_torchrun_rank()


@pytest.mark.parametrize(("size", "place"), OTHERS.items())
def test_one_of_several_processes_of_another_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: str, place: str
) -> None:
    left(monkeypatch, {size: "4", place: "0"})
    assert not is_torchrun_rank()
    with pytest.raises(SettingsError, match=f"^{size}=4, {place}=0: .* or unset {size}"):
        refuse_other_launchers()


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "several", "RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "LOCAL_RANK": "3"},
    ],
    ids=" ".join,
)
def test_variables_that_name_no_other_process_are_harmless(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    left(monkeypatch, variables)
    assert not is_torchrun_rank()
    refuse_other_launchers()


def test_somebody_speaks_whatever_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of ranks with an agent the first of the node, and every process without one."""
    watched = tmp_path_factory.mktemp("agent")
    for local_rank, error_file, speaks in (
        (None, None, True), ("0", None, True), ("3", None, True), ("3", "/gone/error.json", True), ("3", "", True),
        ("0", str(watched / "error.json"), True), ("3", str(watched / "error.json"), False),
    ):  # fmt: skip
        for name, value in (("LOCAL_RANK", local_rank), ("TORCHELASTIC_ERROR_FILE", error_file)):
            monkeypatch.delenv(name, raising=False)
            left(monkeypatch, {} if value is None else {name: value})
        assert speaks_for_node() is speaks


@pytest.mark.parametrize("level", ["nonsense", "", "1"])
def test_what_torch_could_not_be_imported_with_is_refused(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    left(monkeypatch, {"TORCH_DISTRIBUTED_DEBUG": level})
    with pytest.raises(SettingsError, match=f"^TORCH_DISTRIBUTED_DEBUG={level}: must be one of OFF, INFO, DETAIL"):
        is_torchrun_rank()


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL", "detail"])
def test_levels_that_torch_knows_are_taken(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    left(monkeypatch, {"TORCH_DISTRIBUTED_DEBUG": level})
    assert not is_torchrun_rank()

"""What averages travel by."""

import pytest

from adloco_dist.config import Backend
from adloco_dist.setup.placement import backend_of_averages
from helpers.support import FOUR_TRAINERS, small_settings

SHARDED, DELAYED = "pool.ranks_per_worker=2", "wire.delay_updates=1"


@pytest.mark.parametrize(
    ("overrides", "backend", "expected"),
    [
        ((), Backend.nccl, Backend.nccl),
        ((SHARDED,), Backend.nccl, Backend.nccl),
        ((DELAYED,), Backend.nccl, Backend.nccl),
        ((SHARDED, DELAYED), Backend.nccl, Backend.gloo),
        ((SHARDED, DELAYED), Backend.gloo, Backend.gloo),
    ],
)
def test_averages_beside_gathering_ranks_do_not_use_nccl(
    overrides: tuple[str, ...], backend: Backend, expected: Backend
) -> None:
    """Where both did, ranks would launch collectives of two groups in different orders."""
    assert backend_of_averages(small_settings(*FOUR_TRAINERS, *overrides), backend) is expected

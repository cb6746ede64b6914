"""Which validation sequences what is evaluated on."""

import pytest

from adloco_dist.config import EvaluationSettings
from adloco_dist.policy.evaluation import subsets


@pytest.mark.parametrize(("num_sequences", "sequences", "final"), [(1000, 32, 256), (1000, 32, None), (40, 32, 256)])
def test_a_curve_is_part_of_the_result_and_the_choice_is_not(
    num_sequences: int, sequences: int, final: int | None
) -> None:
    found = subsets(num_sequences, EvaluationSettings(sequences=sequences, final_sequences=final))
    assert set(found.curve) <= set(found.final), "the same weights have nearly the same loss on both"
    assert not set(found.choice) & set(found.final), "the best of several looks better where it was chosen"
    assert len(found.choice) == min(sequences, num_sequences // 2)
    assert len(found.final) == min(final or num_sequences, num_sequences - len(found.choice))
    assert len({*found.final, *found.choice}) == len(found.final) + len(found.choice), "none twice"


def test_fewer_sequences_are_the_first_of_more() -> None:
    small, large = (subsets(1000, EvaluationSettings(final_sequences=count)).final for count in (100, 500))
    assert small == large[:100]
    assert max(small) > 900, "of the whole split, not of its beginning"
    assert min(small) < 100


def test_one_sequence_serves_for_everything() -> None:
    found = subsets(1, EvaluationSettings())
    assert (found.curve, found.final, found.choice) == ([0], [0], [0])

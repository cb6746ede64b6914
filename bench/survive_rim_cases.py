"""All cases of the rim."""

from survive_rim_case import Case
from survive_rim_corpora import corpus_cases
from survive_rim_files import file_cases
from survive_rim_mistakes import mistake_cases
from survive_rim_runs import run_cases


def all_cases() -> list[Case]:
    """Every one, in an order that does not change; names are unique."""
    cases = [*mistake_cases(), *file_cases(), *corpus_cases(), *run_cases()]
    names = [case.name for case in cases]
    assert len({*names}) == len(names), sorted(name for name in names if names.count(name) > 1)
    return cases

"""Taking part in a run that is under way: `--join HOST:PORT`, from where its settings and the number of nodes come."""

import argparse
from collections.abc import Sequence

from adloco_dist.cluster.meeting import Terms
from adloco_dist.config import SettingsError
from adloco_dist.config.compose import parse
from adloco_dist.launch.rendezvous import refuse_options
from adloco_dist.members.calls import call
from adloco_dist.messages import decode
from adloco_dist.terminal import report_error
from adloco_dist.text import first_line

SAID_BY_RUN = ("nnodes", "max_restarts", "rdzv_endpoint", "rdzv_id", "slurm", "master_port", "multirun")
ANSWER_SECONDS = 10.0


def as_joined(options: argparse.Namespace) -> argparse.Namespace:
    """The options with what `--join` stands for, if it is given; raises a SettingsError if nothing can be joined there.

    Settings are those of the run; those that are given as well replace them, as nodes may have other memory.
    """
    if options.join is None:
        return options
    refuse_options(options, SAID_BY_RUN, "with --join, where the run says it; leave it out")
    terms = _terms(options.join)
    report_error(f"joining the run at {options.join}: {' '.join(terms.overrides)}")
    said = {
        "nnodes": f"{terms.least}:{terms.most}",
        "max_restarts": terms.max_restarts,
        "rdzv_endpoint": options.join,
        "rdzv_id": terms.run,
        "overrides": replaced(terms.overrides, options.overrides),
    }
    return argparse.Namespace(**{**vars(options), **said})


def replaced(overrides: Sequence[str], others: Sequence[str]) -> list[str]:
    """Settings as typed, of which others replace those with the same key."""
    keys = {override.key_or_group for override in parse(others)}
    kept = [override.input_line or "" for override in parse(overrides) if override.key_or_group not in keys]
    return [*kept, *others]


def _terms(address: str) -> Terms:
    """What a member of the run says at `address`."""
    try:
        reply = call(address, {"ask": "terms", "by": ""}, ANSWER_SECONDS)
        if terms := reply["terms"]:
            return decode(Terms, terms)
        reason = "no run has begun there"
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = first_line(error)
    rule = f"no run can be joined there ({reason}); name the --rdzv-endpoint of one that has --max-restarts"
    raise SettingsError(f"--join={address}: {rule}")

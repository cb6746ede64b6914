"""The analysis of a model's gradients, on as many ranks as there are to share it."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from adloco_dist.config import Backend, Device, Settings, require
from adloco_dist.launch.exit_codes import ends_reported
from adloco_dist.launch.rendezvous import add_torchrun_options, asked_ranks, rendezvous_of

DESCRIPTION = """\
The full gradient G of a run's model over sequences of its corpus, and how far the gradients of single batches are from
it: their norms, deviations and cosines, tr(Sigma), the noise scale, and the batch that the norm test would ask for.
Dropout is off. Started alone, it runs on this machine; under torchrun, on all its nodes.
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/analyze_gradients.py; ends the process."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--sequences", type=int, metavar="N", help="of the split (default: 1024, or all of fewer)")
    parser.add_argument("--batches", metavar="B,B", help="sequences per batch (default: 1,4,16,64, up to N)")
    parser.add_argument("--split", choices=("train", "validation"), help="default: train; of a stream, validation")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the two files (default: RUN/gradients)")
    pass_help = "sequences per pass (default: those of an evaluation)"
    parser.add_argument("--pass", type=int, metavar="P", dest="per_pass", help=pass_help)
    add_torchrun_options(parser)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    with ends_reported() as is_rank:
        sizes = None if options.batches is None else batch_sizes(options.batches)
        if is_rank:
            run_analysis(options, sizes)
        else:
            rendezvous, num_ranks = rendezvous_of(options), asked_ranks(options)
            from adloco_dist.cluster.devices import num_gpus
            from adloco_dist.launch.agent import start_ranks  # takes seconds

            num_ranks = num_ranks or num_gpus() or 2
            start_ranks(rendezvous, num_ranks, ("-m", "adloco_dist.launch.analyze", *arguments), can_stop=False)


def batch_sizes(typed: str) -> tuple[int, ...]:
    """The sizes that "1,4,16" names, ascending, each once; raises a SettingsError for anything but whole numbers from 1
    on."""
    parts = [part.strip() for part in typed.split(",")]
    is_list = all(part.isdecimal() and int(part) >= 1 for part in parts)
    require(is_list, "--batches", typed, "must be whole numbers >= 1 with commas between, as 1,4,16")
    return tuple(sorted({int(part) for part in parts}))


def run_analysis(options: argparse.Namespace, sizes: tuple[int, ...] | None) -> None:
    """Analyse the gradients on this rank; rank 0 writes and reports. Raises a SettingsError on all ranks when one of
    them finds a mistake; nothing was written then."""
    from adloco_dist.cluster.runtime import Runtime
    from adloco_dist.launch.rank import run_together
    from adloco_dist.run.reading import read_run, settings_of
    from adloco_dist.tools.gradients import AnalysisOptions, analyze_run

    asked = AnalysisOptions(options.run, options.sequences, sizes, options.split, options.output, options.per_pass)

    def settings_here() -> Settings:
        """The run's own, with the devices of these machines, which need not be those that it was trained on."""
        settings = settings_of(options.run, read_run(options.run))
        return replace(settings, cluster=replace(settings.cluster, device=Device.auto, backend=Backend.auto))

    def analyze(runtime: Runtime, settings: Settings) -> None:
        analyze_run(runtime, asked)

    run_together(settings_here, "analysing gradients", analyze)


if __name__ == "__main__":
    main()

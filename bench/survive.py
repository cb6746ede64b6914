"""Does a run outlive its processes and its user? Kills, lost nodes, damage, settings, clumsiness, and at what cost."""

import signal

from common import parse, report
from survive_configs import measure_configs
from survive_cost import measure_cost
from survive_damage import measure_damage
from survive_kills import measure_kills
from survive_nodes import measure_links, measure_nodes
from survive_rim import measure_rim
from survive_strangers import measure_strangers

COUNTS = {"cost": 8, "damage": 200, "configs": 500, "kills": 50, "nodes": 1, "links": 20, "rim": 1000, "strangers": 1}
"""By part: starts, damages, command lines, kills, the one run of nodes, cuts of links, cases (all there are), the one
run of the tests that are marked as strangers'."""
QUICK = {"cost": 1, "damage": 200, "configs": 40, "kills": 4, "nodes": 0, "links": 0, "rim": 20, "strangers": 0}


def main() -> None:
    # What is started inherits what is ignored here: under nohup it would not hear of the signals that are tried on it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=COUNTS, help="one part of it")
    parser.add_argument("--count", type=int, help=f"with --only: how many (default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--case", default="", metavar="TEXT", help="with --only rim: cases whose names contain it")
    options = parser.parse_args()
    if options.count is not None and (options.only in (None, "nodes", "strangers") or options.count < 1):
        parser.error(f"--count={options.count}: must be >= 1, of a part other than nodes and strangers (--only)")
    if options.case and options.only != "rim":
        parser.error(f"--case={options.case}: needs --only rim")
    counts = QUICK if options.quick else COUNTS
    if options.only:
        count = options.count or counts[options.only] or COUNTS[options.only]
        counts = dict.fromkeys(COUNTS, 0) | {options.only: count}
    figures: dict[str, float] = {}
    rows: list[list[str]] = []
    if counts["cost"]:
        cost, table = measure_cost(counts["cost"])
        figures |= cost
        rows += table
    if counts["damage"]:
        figures |= measure_damage(counts["damage"])
    if counts["configs"]:
        figures |= measure_configs(counts["configs"], options.seed)
    if counts["kills"]:
        figures |= measure_kills(counts["kills"], options.seed)
    if counts["nodes"]:
        figures |= measure_nodes()
    if counts["links"]:
        figures |= measure_links(counts["links"])
    if counts["rim"]:
        figures |= measure_rim(counts["rim"], options.seed, options.case)
    if counts["strangers"]:
        figures |= measure_strangers()
    rows += [[name, f"{value:.4g}"] for name, value in figures.items() if not name.startswith("checkpoint")]
    report("survival, 2 ranks (nodes: 3 hosts)", ["", "measured"], rows, figures, options.json)


if __name__ == "__main__":
    main()

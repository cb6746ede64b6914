"""Does a run outlive its processes? Kills, lost nodes, damaged files, the cost of a checkpoint, random settings."""

from common import parse, report
from survive_configs import measure_configs
from survive_cost import measure_cost
from survive_damage import measure_damage
from survive_kills import measure_kills
from survive_nodes import measure_nodes

PARTS = ("cost", "damage", "configs", "kills", "nodes")


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    options = parser.parse_args()
    wanted = [options.only] if options.only else PARTS
    figures: dict[str, float] = {}
    rows: list[list[str]] = []
    if "cost" in wanted:
        cost, table = measure_cost(1 if options.quick else 8)
        figures |= cost
        rows += table
    if "damage" in wanted:
        figures |= measure_damage(200)
    if "configs" in wanted:
        figures |= measure_configs(40 if options.quick else 500, options.seed)
    if "kills" in wanted:
        figures |= measure_kills(4 if options.quick else 50, options.seed)
    if "nodes" in wanted and not options.quick:
        figures |= measure_nodes()
    rows += [[name, f"{value:.4g}"] for name, value in figures.items() if not name.startswith("checkpoint")]
    report("survival, 2 ranks (nodes: 3 hosts)", ["", "measured"], rows, figures, options.json)


if __name__ == "__main__":
    main()

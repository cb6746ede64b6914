"""What all ranks agree on before training, and everything that can be refused by then."""

from pathlib import Path

from transformers import PretrainedConfig

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.environment import measure_links, survey
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend, Settings, SettingsError, TrackingMode
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.data.corpora import Splits, load_corpus
from adloco_dist.decisions.environment import Environment, Link, first_difference, must_agree, told_by_value
from adloco_dist.decisions.layout import Layout, experiment_layout
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.decisions.state import RunState
from adloco_dist.models import in_words, num_parameters
from adloco_dist.pool.capacity import available_bytes, state_bytes
from adloco_dist.preflight import examine_corpus, examine_model, examine_replay
from adloco_dist.run.directory import RunDirectory, existing_part, open_directory
from adloco_dist.shapes import ParameterCount

OF_THE_NODE = {"batching.capacity", "cluster.interface", "cluster.memory_bytes", "cluster.threads_per_rank"}
"""Settings that may differ between nodes: they say how a device does its work, not what the run computes."""

PROBE_BYTES = 1 << 20
"""Payload that measures a link before training: 0.1 s at 100 Mbit/s."""
LINK_SECONDS = 120.0


def survey_cluster(runtime: Runtime, settings: Settings) -> tuple[list[Environment], list[Link]]:
    """Every rank's environment, and the links between nodes where they are measured. Collective.

    Raises:
        SettingsError: on all ranks, when some run other code than others.
    """
    environments = survey(runtime, run_disk(settings))
    _refuse_difference([must_agree(environment) for environment in environments])
    if not settings.cluster.check_links:
        return environments, []
    return environments, measure_links(runtime, Backend.gloo, PROBE_BYTES, LINK_SECONDS)


def run_disk(settings: Settings) -> Path:
    """The folder on whose disk the run directory is, or will be made."""
    return existing_part(Path(settings.run.directory or settings.run.root))


def compare_settings(control: ControlPlane, settings: Settings) -> None:
    """All ranks must run the same experiment.

    Raises:
        SettingsError: on all ranks, with a setting and the ranks that differ in it.
    """
    plain = flatten(to_plain(settings))
    _refuse_difference(control.exchange({key: value for key, value in plain.items() if key not in OF_THE_NODE}))


def _refuse_difference(members: list[dict[str, str]]) -> None:
    if difference := first_difference(members):
        raise SettingsError(f"{difference}; start every node with the same command and code")


def prepare(
    settings: Settings, runtime: Runtime, resumed: RunState | None = None
) -> tuple[Layout, Splits, PretrainedConfig, Trajectory]:
    """Everything that can be refused before a run exists: layout, corpus, the model's shape, batches to replay.

    The batches are known on rank 0 alone, which plans with them.

    Args:
        resumed: where the run goes on; None: it begins.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake.
    """
    layout = resumed.plan.layout if resumed else experiment_layout(settings, runtime.nodes)
    prepared: tuple[Splits, PretrainedConfig] | None = None
    trajectory = Trajectory()
    error: SettingsError | None = None
    try:
        splits = load_corpus(settings.data, settings.seed) if resumed else examine_corpus(settings, layout)
        if resumed and splits.digest != resumed.corpus:
            told = f"digest {splits.digest[:8]}, {resumed.corpus[:8]} then"
            rule = f"its text is not what the run was trained on ({told})"
            raise SettingsError(f"data.corpus={settings.data.corpus.name}: {rule}; give it the same")
        is_first_of_node = runtime.nodes.index(runtime.nodes[runtime.rank]) == runtime.rank
        config = examine_model(settings, splits, reads_weights=is_first_of_node)
        check_memory(settings, runtime, layout, num_parameters(settings.model, config, settings.data.is_labelled))
        prepared = (splits, config)
        if runtime.rank == 0:
            trajectory = examine_replay(settings, None if resumed else layout)
            if settings.tracking.mode is TrackingMode.online:
                from adloco_dist.run.tracking import check_login  # half a second

                check_login()
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
    assert prepared is not None
    corpora = runtime.control.exchange({"digest": prepared[0].digest, "source": prepared[0].source})
    if len({corpus["digest"] for corpus in corpora}) > 1:
        told = told_by_value([f"{corpus['source']} {corpus['digest'][:8]}" for corpus in corpora])
        raise SettingsError(f"data.corpus={settings.data.corpus.name} differs between ranks: {told}; give all the same")
    return layout, *prepared, trajectory


def check_memory(settings: Settings, runtime: Runtime, layout: Layout, parameters: ParameterCount) -> None:
    """This rank's share of the pool must fit into its memory, before any of it is built.

    Raises:
        SettingsError: it does not.
    """
    hosted = [len(layout.workers_on(runtime.rank, trainer)) for trainer in layout.trainers_on(runtime.rank)]
    needed = state_bytes(settings, len(hosted), sum(hosted), parameters.trained, parameters.frozen)
    given = settings.cluster.memory_bytes if runtime.device.type == "cpu" else None
    sharers = runtime.nodes.count(runtime.nodes[runtime.rank])
    memory = available_bytes(runtime.device, sharers) if given is None else given
    if needed > memory:
        told = f"{parameters.total:,} parameters, of which the workers of a rank take {needed / 1e6:,.0f} MB"
        what = "are available to it" if given is None else "are cluster.memory_bytes"
        remedy = "use a smaller model, fewer workers per rank, or more memory"
        raise SettingsError(f"{in_words(settings.model)}: has {told}, and {memory / 1e6:,.0f} MB {what}; {remedy}")


def agree_on_directory(
    control: ControlPlane, settings: Settings, needed_bytes: int, goes_on: bool = False
) -> tuple[Path, RunDirectory | None]:
    """Rank 0 makes and takes the run directory, all ranks learn its path.

    Args:
        needed_bytes: what must be free there.
        goes_on: the run in it goes on from one of its checkpoints.

    Raises:
        SettingsError: on all ranks, when rank 0 cannot have it.
    """
    error: SettingsError | None = None
    directory: RunDirectory | None = None
    if control.rank == 0:
        try:
            directory = open_directory(settings.run, needed_bytes, goes_on)
        except SettingsError as mistake:
            error = mistake
    reply = {"path": str(directory.path) if directory else "", "error": str(error) if error else None}
    message = control.broadcast(reply if control.rank == 0 else None)
    if message["error"]:
        raise SettingsError(message["error"])
    return Path(message["path"]), directory

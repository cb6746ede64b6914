"""One rank of a run: agree with the others on settings, corpus and layout, train, write what lasts."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
import torch
import transformers
from rich.console import Console
from transformers import PretrainedConfig

import adloco_dist
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.runtime import Place, Runtime, started
from adloco_dist.cluster.signals import stop_on_signals
from adloco_dist.config import Settings, SettingsError, Shards, TrackingMode
from adloco_dist.config.compose import compose, flatten, to_plain
from adloco_dist.data.corpora import Splits, load_corpus
from adloco_dist.decisions.layout import Layout, experiment_layout
from adloco_dist.decisions.plan import Premises
from adloco_dist.decisions.replay import Trajectory, check_trajectory
from adloco_dist.hosting import Rank, find_premises, host
from adloco_dist.models import build_model, model_config
from adloco_dist.run.directory import choose_directory
from adloco_dist.run.display import Display
from adloco_dist.run.journal import Journal, MetricsFile, RunFile, Sink
from adloco_dist.run.model import save_model
from adloco_dist.run.records import read_trajectory
from adloco_dist.run.tracking import WandbSink
from adloco_dist.tools.planner import print_dry_run
from adloco_dist.train import RanksDisagreeError, train

OF_THE_NODE = {"batching.capacity", "cluster.memory_bytes", "cluster.threads_per_rank"}
"""Settings that may differ between nodes: they say how a device does its work, not what the run computes."""


def run_rank(overrides: Sequence[str], dry_run: bool) -> None:
    """What every process that torchrun starts does.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake; nothing was written then.
    """
    transformers.utils.logging.disable_progress_bar()  # rank 0 shows the run's own
    settings, error = _compose(overrides)
    with started(settings.cluster, Place.from_torchrun()) as runtime:
        control = runtime.control
        control.agree(error)
        compare_settings(control, settings)
        if dry_run:
            if runtime.rank == 0:
                print_dry_run(settings, runtime.nodes)
            return
        layout, splits, config, trajectory = prepare(settings, runtime)
        rank = host(settings, runtime, splits, build_model(settings.model, config, settings.seed), layout)
        premises = find_premises(rank, layout, trajectory)
        directory = agree_on_directory(control, settings)
        with stop_on_signals() as stop:
            journal = open_journal(rank, premises, directory)
            try:
                outcome = train(rank, premises, journal, stop)
            except RanksDisagreeError as difference:
                journal.close()
                if runtime.rank == 0:
                    print(f"error: {difference}", file=sys.stderr)
                sys.exit(1)
            if outcome.weights is not None and runtime.rank == 0:
                path = save_model(directory, outcome.flat_model, outcome.weights, splits)
                journal.close({"stop": outcome.stop, **outcome.result})
                print(f"ended: {outcome.stop}\nrun directory: {directory}\nmodel: {path}")
            elif runtime.rank == runtime.nodes.index(runtime.nodes[runtime.rank]):
                # Every node's terminal tells how it went; files are on rank 0's node.
                best = min(candidate["validation_perplexity"] for candidate in outcome.result["candidates"])
                where = f"run directory on {runtime.hosts[0]}: {directory}"
                print(f"ended: {outcome.stop}; best perplexity {best:.3f}; {where}")


def compare_settings(control: ControlPlane, settings: Settings) -> None:
    """All ranks must run the same experiment with the same code.

    Raises:
        SettingsError: on all ranks, with the keys and ranks that differ.
    """
    plain = {key: value for key, value in flatten(to_plain(settings)).items() if key not in OF_THE_NODE}
    mine = {**plain, "adloco_dist version": adloco_dist.__version__, "torch": torch.__version__}
    everyone = control.exchange(mine)
    for key in sorted({key for other in everyone for key in other}):
        values: dict[str, list[int]] = {}
        for rank, other in enumerate(everyone):
            values.setdefault(str(other.get(key)), []).append(rank)
        if len(values) > 1:
            told = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            raise SettingsError(f"{key} differs between ranks: {told}; start every node with the same command and code")


def prepare(settings: Settings, runtime: Runtime) -> tuple[Layout, Splits, PretrainedConfig, Trajectory]:
    """Everything that can be refused before a run exists: layout, corpus, the model's shape, batches to replay.

    The batches are known on rank 0 alone, which plans with them.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake.
    """
    layout = experiment_layout(settings, runtime.nodes)
    prepared: tuple[Splits, PretrainedConfig] | None = None
    trajectory = Trajectory()
    error: SettingsError | None = None
    try:
        splits = load_corpus(settings.data)
        check_shards(layout, splits, settings.data.shards)
        prepared = splits, model_config(settings.model, splits.vocab_size, settings.data.sequence_length)
        if settings.batching.replay is not None and runtime.rank == 0:
            trajectory = read_trajectory("batching.replay", settings.batching.replay)
            check_trajectory(settings, layout, trajectory)
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
    assert prepared is not None
    corpora = runtime.control.exchange({"digest": prepared[0].digest, "source": prepared[0].source})
    if len({corpus["digest"] for corpus in corpora}) > 1:
        told = ", ".join(
            f"rank {rank} ({host}) has {corpus['source']} {corpus['digest'][:8]}"
            for rank, (host, corpus) in enumerate(zip(runtime.hosts, corpora, strict=True))
        )
        raise SettingsError(f"data.corpus={settings.data.corpus.name} differs between ranks: {told}; give all the same")
    return layout, *prepared, trajectory


def check_shards(layout: Layout, splits: Splits, policy: Shards) -> None:
    """Every trainer's shard must hold a sequence for each of its workers; larger batches are capped at the shard."""
    num_parts = 1 if policy is Shards.shared else len(layout.trainers)
    smallest, workers = splits.train.num_sequences // num_parts, layout.num_workers(0)
    if smallest < workers:
        raise SettingsError(
            f"pool.workers_per_trainer={workers}: a trainer's shard has {smallest} sequences "
            f"({splits.train.num_sequences} in {num_parts} shards), less than one for each worker; "
            "use more text, shorter sequences, fewer trainers or workers"
        )


def agree_on_directory(control: ControlPlane, settings: Settings) -> Path:
    """Rank 0 chooses and makes the run directory."""
    error: SettingsError | None = None
    path = ""
    if control.rank == 0:
        try:
            directory = choose_directory(settings.run)
            directory.mkdir(parents=True, exist_ok=True)
            path = str(directory)
        except SettingsError as mistake:
            error = mistake
        except OSError as mistake:
            name, value = (
                ("root", settings.run.root) if settings.run.directory is None else ("directory", settings.run.directory)
            )
            error = SettingsError(f"run.{name}={value}: cannot be made ({mistake.strerror}); name another directory")
    message = control.broadcast({"path": path, "error": str(error) if error else None} if control.rank == 0 else None)
    if message["error"]:
        raise SettingsError(message["error"])
    return Path(message["path"])


def open_journal(rank: Rank, premises: Premises, directory: Path) -> Journal:
    """Rank 0's files, tracking and display; a journal without sinks elsewhere."""
    if rank.runtime.rank:
        return Journal()
    settings = rank.settings
    plain = to_plain(settings)
    sinks: list[Sink] = [RunFile(directory, _facts(rank, premises, plain)), MetricsFile(directory)]
    if settings.tracking.mode is not TrackingMode.disabled:
        sinks.append(WandbSink(settings.tracking, directory, plain))
    sinks.append(Display(Console(), settings.budget))
    return Journal(sinks)


def _facts(rank: Rank, premises: Premises, plain: dict[str, Any]) -> dict[str, Any]:
    runtime, splits = rank.runtime, rank.splits
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "adloco_dist": adloco_dist.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hydra": hydra.__version__,
        },
        "settings": plain,
        "layout": asdict(premises.layout),
        "batch_limits": premises.batch_limits,
        "instances": {"at_once": premises.is_concurrent, "resident": rank.residence.resident},
        "cluster": {
            "world_size": runtime.world_size,
            "nodes": runtime.nodes,
            "hosts": runtime.hosts,
            "device": str(runtime.device),
            "backend": runtime.backend.name,
            "threads_per_rank": runtime.threads,
        },
        "corpus": {
            "source": splits.source,
            "digest": splits.digest,
            "train_tokens": len(splits.train.tokens),
            "validation_tokens": len(splits.validation.tokens),
            "vocab_size": splits.vocab_size,
        },
    }


def _compose(overrides: Sequence[str]) -> tuple[Settings, SettingsError | None]:
    """The settings, or the defaults with the error: even a rank with wrong settings must reach the others to say so."""
    try:
        return compose(overrides), None
    except SettingsError as error:
        return Settings(), error

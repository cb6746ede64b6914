"""Where a run goes on: the newest whole checkpoint, found and agreed on by all ranks, wherever its parts lie."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.volumes import Volumes, volumes_of
from adloco_dist.config import Algorithm, Concurrency, Settings, SettingsError, Unfinished, require
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.decisions.checkpointing import check_resumed, number_in
from adloco_dist.decisions.state import RunState
from adloco_dist.launch.nodes import check_restarts
from adloco_dist.run.directory import free_name, is_finished
from adloco_dist.run.parts import (
    CHECKPOINTS_DIRECTORY,
    MANIFEST_FILE,
    RECORDS_FILE,
    STATE_FILE,
    DamagedError,
    Manifest,
    Part,
    check_part,
    decode_tensors,
    prune,
    read_manifest,
)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Archive:
    """A whole checkpoint, and who holds which of its parts."""

    name: str
    volumes: Volumes
    manifest: Manifest
    holders: Mapping[str, Sequence[int]]
    """By part: the volumes that hold it undamaged."""

    def read(self, file: str) -> Mapping[str, torch.Tensor]:
        """The tensors of a part; from another node where this one does not hold it.

        Raises:
            DamagedError: it is not what the manifest says.
            OSError: it cannot be had.
        """
        return decode_tensors(self.content(file))

    def content(self, file: str) -> bytes:
        """A part as it was written; raises as `read`."""
        holders, path = self.holders[file], f"{self.name}/{file}"
        if self.volumes.mine in holders:
            return (self.volumes.folder / path).read_bytes()
        content = self.volumes.fetch(holders[0], path)
        self.manifest[file].check(file, content)
        return content

    def records(self) -> bytes | None:
        """metrics.jsonl as of the checkpoint, where nodes have directories of their own; else None."""
        return self.content(RECORDS_FILE) if RECORDS_FILE in self.manifest else None


@dataclass(frozen=True)
class Source:
    """What a run goes on from."""

    archive: Archive
    state: RunState
    """As it goes on with these ranks."""
    is_same_layout: bool
    """Whether workers are hosted where they were."""


def check_restarts_of_rank(settings: Settings) -> None:
    """Under torchrun --max-restarts, the next start must find what this one leaves, and nothing else.

    Raises:
        SettingsError: it would not.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    check_restarts(settings, restarts)
    keeps_store = restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rule = "torchrun would keep its store, with what the last start left there"
    remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"
    require(not keeps_store, "--max-restarts", restarts, f"{rule}; {remedy}")


def is_elastic() -> bool:
    """Whether torchrun starts the ranks again when one fails, or nodes come and go."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def has_ended(control: ControlPlane, settings: Settings) -> bool:
    """Whether the run that is to go on has come to its own end, as who starts it again and again may not know."""
    run = settings.run
    ended = run.unfinished is Unfinished.resume and run.directory is not None and is_finished(Path(run.directory))
    return any(reply["ended"] for reply in control.exchange({"ended": ended}))


@contextmanager
def fresh_volumes(runtime: Runtime, directory: Path, settings: Settings) -> Iterator[Volumes]:
    """Where a run that begins writes its checkpoints, while the block runs. Collective.

    Checkpoints of another run, which may be left on nodes with directories of their own, are set aside there.
    """
    folder = directory / CHECKPOINTS_DIRECTORY
    with volumes_of(runtime, folder, lambda path: received(folder, path, settings)) as volumes:
        if runtime.rank == volumes.mine and any(number_in(path.name) for path in folder.iterdir()):
            folder.rename(free_name(folder))
            folder.mkdir()
        runtime.control.exchange({})
        yield volumes


@contextmanager
def resumed(runtime: Runtime, settings: Settings, tell: Tell) -> Iterator[Source | None]:
    """The checkpoint that the settings say to go on from, readable while the block runs; None: the run begins.

    Collective.

    Args:
        tell: takes lines for the user; on rank 0.

    Raises:
        SettingsError: on all ranks, when the run there cannot go on with these settings.
    """
    run, control = settings.run, runtime.control
    if run.unfinished is not Unfinished.resume or run.directory is None:
        yield None
        return
    directory = Path(run.directory)
    folder = directory / CHECKPOINTS_DIRECTORY
    if not any(reply["there"] for reply in control.exchange({"there": folder.is_dir()})):
        yield None
        return
    with volumes_of(runtime, folder, lambda path: received(folder, path, settings)) as volumes:
        found = _find(control, volumes, tell)
        if found is None:
            tell(f"{directory} holds no whole checkpoint: the run begins anew")
            yield None
            return
        archive, state = found
        where, num_ranks = folder / archive.name, state.world_size
        remarks = check_resumed(str(where), state.settings, flatten(to_plain(settings)))
        is_same = num_ranks == runtime.world_size
        if settings.algorithm.name is Algorithm.ddp and not is_same:
            rule = f"algorithm=ddp has one worker per rank; start {num_ranks} ranks instead of {runtime.world_size}"
            raise SettingsError(f"run.directory={directory}: {rule}")
        for remark in remarks:
            tell(remark)
        place = "" if state.pool else ", in the middle of the next"
        ranks = "" if is_same else f"; workers of {num_ranks} ranks are hosted on {runtime.world_size}"
        tell(f"goes on from {where}{place}{ranks}")
        yield Source(archive, state.hosted_on(runtime.nodes, settings.pool.placement), is_same)


def received(folder: Path, path: str, settings: Settings) -> None:
    """A file came from another node; with a manifest, older checkpoints are kept no longer here either."""
    if path.endswith(MANIFEST_FILE):
        prune(folder, settings.checkpoint)


def as_decided(settings: Settings, source: Source | None) -> Settings:
    """What was measured at the first start, and would be measured anew: the same ranks go on in the same way."""
    if source is None or not source.is_same_layout or settings.instances.concurrency is not Concurrency.auto:
        return settings
    at_once = Concurrency.streams if torch.cuda.is_available() else Concurrency.threads
    decided = at_once if source.state.plan.is_concurrent else Concurrency.serial
    return replace(settings, instances=replace(settings.instances, concurrency=decided))


def _find(control: ControlPlane, volumes: Volumes, tell: Tell) -> tuple[Archive, RunState] | None:
    """The newest checkpoint of which every part is somewhere; lines for all newer ones."""
    manifests, problems = _manifests(volumes)
    replies = control.exchange({"manifests": manifests, "problems": problems})
    everywhere = {name: parts for reply in replies for name, parts in reply["manifests"].items()}
    for name, problem in sorted({(name, line) for reply in replies for name, line in reply["problems"].items()}):
        if name not in everywhere:
            tell(f"checkpoint {name} is skipped: {problem}")
    names = {name for reply in replies for name in (*reply["problems"], *reply["manifests"])}
    newest = max((number_in(name) or 0 for name in names), default=0)
    for name in sorted(everywhere, key=lambda name: number_in(name) or 0, reverse=True):
        manifest = {file: Part(**part) for file, part in everywhere[name].items()}
        holders = _check_parts(control, volumes, name, manifest, tell)
        if holders is None:
            continue
        archive = Archive(name, volumes, manifest, holders)
        content = json.loads(archive.content(STATE_FILE)) if control.rank == 0 else None
        state = RunState.from_message(control.broadcast(content))
        # Numbers go on above all that were ever given, the damaged ones' too.
        mark = replace(state.plan.last_checkpoint, number=newest)
        return archive, replace(state, plan=replace(state.plan, last_checkpoint=mark))
    return None


def _manifests(volumes: Volumes) -> tuple[dict[str, dict[str, dict[str, object]]], dict[str, str]]:
    """Of all checkpoints on this rank's volume, told by its lowest rank: the manifests, or why there is none."""
    manifests: dict[str, dict[str, dict[str, object]]] = {}
    problems: dict[str, str] = {}
    if volumes.rank == volumes.mine:
        for path in volumes.folder.iterdir():
            if number_in(path.name) is None:
                continue
            try:
                manifests[path.name] = {file: asdict(part) for file, part in read_manifest(path).items()}
            except DamagedError as error:
                problems[path.name] = str(error)
    return manifests, problems


def _check_parts(
    control: ControlPlane, volumes: Volumes, name: str, manifest: Manifest, tell: Tell
) -> dict[str, list[int]] | None:
    """The volumes that hold each part undamaged, None if one is nowhere; the ranks of a volume share the reading."""
    sharers = [rank for rank, volume in enumerate(volumes.of_rank) if volume == volumes.mine]
    good, problems = [], {}
    for file in sorted(manifest)[sharers.index(volumes.rank) :: len(sharers)]:
        try:
            check_part(volumes.folder / name, file, manifest[file])
            good.append(file)
        except DamagedError as error:
            problems[file] = str(error)
    replies = control.exchange({"good": good, "problems": problems})
    holders: dict[str, list[int]] = {file: [] for file in manifest}
    for volume, reply in zip(volumes.of_rank, replies, strict=True):
        for file in reply["good"]:
            holders[file].append(volume)
    lost = [file for file, where in holders.items() if not where]
    for file in lost[:1]:
        lines = sorted({reply["problems"][file] for reply in replies if file in reply["problems"]})
        tell(f"checkpoint {name} is skipped: {' and '.join(lines)}")
    return None if lost else holders

"""Which checkpoint a run goes on from: the newest that is whole and understood, wherever its parts lie."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from adloco_dist.checkpointing import needed_parts, vector_size
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.volumes import Volumes
from adloco_dist.config import SettingsError
from adloco_dist.decisions.checkpointing import number_in
from adloco_dist.decisions.state import RunState
from adloco_dist.run.parts import (
    MANIFEST_FILE,
    RECORDS_FILE,
    STATE_FILE,
    DamagedError,
    Manifest,
    Part,
    check_part,
    decode_tensors,
    read_manifest,
    tensor_kinds,
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
        return decode_tensors(file, self.content(file))

    def content(self, file: str) -> bytes:
        """A part as it was written; raises as `read`."""
        if file not in self.holders:
            raise DamagedError(f"{file}: is not in its {MANIFEST_FILE}")
        holders, path = self.holders[file], f"{self.name}/{file}"
        if self.volumes.mine in holders:
            return (self.volumes.folder / path).read_bytes()
        content = self.volumes.fetch(holders[0], path)
        self.manifest[file].check(file, content)
        return content

    def records(self) -> bytes | None:
        """metrics.jsonl as of the checkpoint, where nodes have directories of their own; else None."""
        return self.content(RECORDS_FILE) if RECORDS_FILE in self.manifest else None


def find(control: ControlPlane, volumes: Volumes, tell: Tell) -> tuple[Archive, RunState] | None:
    """The newest checkpoint of which every part is somewhere and can be understood; lines for all newer ones.

    Collective.

    Raises:
        SettingsError: on all ranks, when the folder of checkpoints cannot be read on one.
    """
    error: SettingsError | None = None
    manifests: dict[str, dict[str, dict[str, object]]] = {}
    problems: dict[str, str] = {}
    try:
        manifests, problems = _manifests(volumes)
    except OSError as mistake:
        told = f"{volumes.folder} cannot be read ({mistake.strerror}); move it away, or name another"
        error = SettingsError(f"run.directory={volumes.folder.parent}: {told}")
    control.agree(error)
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
        state = _state(control, archive, tell)
        if state is None or not _check_tensors(control, archive, state, tell):
            continue
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
    good, problems = [], {}
    for file in _dealt(volumes, sorted(manifest)):
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


def _state(control: ControlPlane, archive: Archive, tell: Tell) -> RunState | None:
    """The state in a checkpoint, as rank 0 reads it; None: it cannot be understood. Collective."""
    message = {}
    if control.rank == 0:
        try:
            message = {"state": json.loads(archive.content(STATE_FILE))}
            json.dumps(message)  # as it will travel
            RunState.understood(message["state"])
        except (DamagedError, OSError) as error:
            message = {"problem": str(error)}
        except (ValueError, RecursionError) as error:
            message = {"problem": f"{STATE_FILE}: is not what this version writes ({error})"}
    message = control.broadcast(message)
    if "problem" in message:
        tell(f"checkpoint {archive.name} is skipped: {message['problem']}")
        return None
    return RunState.from_message(message["state"])


def _check_tensors(control: ControlPlane, archive: Archive, state: RunState, tell: Tell) -> bool:
    """Whether every part holds the tensors that the state asks for, of one size; read by those who hold it."""
    needed, volumes = needed_parts(state), archive.volumes
    sizes: dict[str, int | None] = {}
    problems = [f"{file}: is not in its {MANIFEST_FILE}" for file in sorted(needed.keys() - archive.manifest.keys())]
    for file in _dealt(volumes, sorted(needed.keys() & archive.manifest.keys())):
        if volumes.mine in archive.holders[file]:
            try:
                kinds = tensor_kinds(volumes.folder / archive.name, file)
                sizes[file] = vector_size(file, kinds, needed[file])
            except DamagedError as error:
                problems.append(str(error))
    replies = control.exchange({"sizes": sizes, "problems": problems})
    problems = sorted({line for reply in replies for line in reply["problems"]})
    found = {size: file for reply in replies for file, size in sorted(reply["sizes"].items()) if size is not None}
    if len(found) > 1:
        problems.append(" and ".join(f"{file}: has vectors of {size} elements" for size, file in sorted(found.items())))
    for problem in problems[:1]:
        tell(f"checkpoint {archive.name} is skipped: {problem}")
    return not problems


def _dealt(volumes: Volumes, files: list[str]) -> list[str]:
    """This rank's share of files that all ranks of its volume could read."""
    sharers = [rank for rank, volume in enumerate(volumes.of_rank) if volume == volumes.mine]
    return files[sharers.index(volumes.rank) :: len(sharers)]

"""Which checkpoint a run resumes from: the newest that is whole and understood, wherever its parts lie."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adloco_dist.checkpoint.parts import RECORDS_FILE, STATE_FILE, mapped_tensors, tensor_kinds
from adloco_dist.checkpoint.retention import number_in
from adloco_dist.checkpoint.saving import needed_parts, vector_size
from adloco_dist.checkpoint.state import RunState
from adloco_dist.checkpoint.storage import StorageDomains
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import SettingsError
from adloco_dist.messages import decode, encode
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError, Manifest, Part, check_part, read_manifest

ReportLine = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointReader:
    """A whole checkpoint, and who holds which of its parts."""

    name: str
    domains: StorageDomains
    manifest: Manifest
    holders: Mapping[str, Sequence[int]]
    """Volumes that hold each part undamaged, by part."""

    def read(self, file: str) -> Mapping[str, torch.Tensor]:
        """The tensors of a part, in mapped memory; from another node where this one does not hold it.

        Raises:
            DamagedError: it is not what the manifest says.
            OSError: it cannot be read.
        """
        with self._at_hand(file) as path:
            return mapped_tensors(path, file)

    def content(self, file: str) -> bytes:
        """A part as it was written; raises as `read`."""
        with self._at_hand(file) as path:
            return path.read_bytes()

    @contextmanager
    def _at_hand(self, file: str) -> Iterator[Path]:
        """Where a part can be read while the block runs: as it is here, or as a copy of another node's.

        A copy is removed at the end; what has been mapped of it by then stays readable, and takes no memory that the
        system could not have back.
        """
        if file not in self.holders:
            raise DamagedError(f"{file}: is not in its {MANIFEST_FILE}")
        holders, path = self.holders[file], self.domains.folder / self.name / file
        if self.domains.mine in holders:
            yield path
            return
        copy = self.domains.folder / f".{self.name}-{file}.rank{self.domains.rank}"
        try:
            self.manifest[file].check(file, self.domains.fetch(holders[0], f"{self.name}/{file}", copy))
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    def records(self) -> bytes | None:
        """metrics.jsonl as of the checkpoint, where nodes have directories of their own; else None."""
        return self.content(RECORDS_FILE) if RECORDS_FILE in self.manifest else None


def find(
    control: ControlPlane, domains: StorageDomains, report_line: ReportLine
) -> tuple[CheckpointReader, RunState] | None:
    """The newest checkpoint of which every part is somewhere and can be understood; lines for all newer ones.

    Collective.

    Raises:
        SettingsError: on all ranks, when the folder of checkpoints cannot be read on one.
    """
    error: SettingsError | None = None
    manifests: dict[str, dict[str, dict[str, object]]] = {}
    problems: dict[str, str] = {}
    try:
        manifests, problems = _manifests(domains)
    except OSError as mistake:
        detail = f"{domains.folder} cannot be read ({mistake.strerror}); move it away, or name another"
        error = SettingsError(f"run.directory={domains.folder.parent}: {detail}")
    control.agree(error)
    replies = control.exchange({"manifests": manifests, "problems": problems})
    everywhere = {name: parts for reply in replies for name, parts in reply["manifests"].items()}
    for name, problem in sorted({(name, line) for reply in replies for name, line in reply["problems"].items()}):
        if name not in everywhere:
            report_line(f"checkpoint {name} is skipped: {problem}")
    names = {name for reply in replies for name in (*reply["problems"], *reply["manifests"])}
    newest = max((number_in(name) or 0 for name in names), default=0)
    for name in sorted(everywhere, key=lambda name: number_in(name) or 0, reverse=True):
        manifest = decode(dict[str, Part], everywhere[name])
        holders = _check_parts(control, domains, name, manifest, report_line)
        if holders is None:
            continue
        reader = CheckpointReader(name, domains, manifest, holders)
        state = _state(control, reader, report_line)
        if state is None or not _check_tensors(control, reader, state, report_line):
            continue
        # Numbers continue above all that were ever given, the damaged ones' too.
        checkpoint_id = replace(state.plan.last_checkpoint, number=newest)
        return reader, replace(state, plan=replace(state.plan, last_checkpoint=checkpoint_id))
    return None


def _manifests(domains: StorageDomains) -> tuple[dict[str, dict[str, dict[str, object]]], dict[str, str]]:
    """Return the manifests on this rank's volume, by checkpoint, or why there is none; on its lowest rank alone."""
    manifests: dict[str, dict[str, dict[str, object]]] = {}
    problems: dict[str, str] = {}
    if domains.rank == domains.mine:
        for path in domains.folder.iterdir():
            if number_in(path.name) is None:
                continue
            try:
                manifests[path.name] = encode(read_manifest(path))
            except DamagedError as error:
                problems[path.name] = str(error)
    return manifests, problems


def _check_parts(
    control: ControlPlane, domains: StorageDomains, name: str, manifest: Manifest, report_line: ReportLine
) -> dict[str, list[int]] | None:
    """The volumes that hold each part undamaged, None if one is nowhere; the ranks of a volume share the reading."""
    good, problems = [], {}
    for file in _dealt(domains, sorted(manifest)):
        try:
            check_part(domains.folder / name, file, manifest[file])
            good.append(file)
        except DamagedError as error:
            problems[file] = str(error)
    replies = control.exchange({"good": good, "problems": problems})
    holders: dict[str, list[int]] = {file: [] for file in manifest}
    for domain, reply in zip(domains.of_rank, replies, strict=True):
        for file in reply["good"]:
            holders[file].append(domain)
    lost = [file for file, where in holders.items() if not where]
    for file in lost[:1]:
        lines = sorted({reply["problems"][file] for reply in replies if file in reply["problems"]})
        report_line(f"checkpoint {name} is skipped: {' and '.join(lines)}")
    return None if lost else holders


def _state(control: ControlPlane, reader: CheckpointReader, report_line: ReportLine) -> RunState | None:
    """The state in a checkpoint, as rank 0 reads it; None: it cannot be understood. Collective."""
    message = {}
    if control.rank == 0:
        try:
            message = {"state": json.loads(reader.content(STATE_FILE))}
            json.dumps(message)  # as it will travel
            RunState.from_message(message["state"])
        except (DamagedError, OSError) as error:
            message = {"problem": str(error)}
        except (ValueError, RecursionError) as error:
            message = {"problem": f"{STATE_FILE}: is not what this version writes ({error})"}
    message = control.broadcast(message)
    if "problem" in message:
        report_line(f"checkpoint {reader.name} is skipped: {message['problem']}")
        return None
    return RunState.from_message(message["state"])


def _check_tensors(control: ControlPlane, reader: CheckpointReader, state: RunState, report_line: ReportLine) -> bool:
    """Whether every part holds the tensors that the state asks for, of one size; read by those who hold it."""
    needed, domains = needed_parts(state), reader.domains
    sizes: dict[str, int | None] = {}
    problems = [f"{file}: is not in its {MANIFEST_FILE}" for file in sorted(needed.keys() - reader.manifest.keys())]
    for file in _dealt(domains, sorted(needed.keys() & reader.manifest.keys())):
        if domains.mine in reader.holders[file]:
            try:
                kinds = tensor_kinds(domains.folder / reader.name, file)
                sizes[file] = vector_size(file, kinds, needed[file])
            except DamagedError as error:
                problems.append(str(error))
    replies = control.exchange({"sizes": sizes, "problems": problems})
    problems = sorted({line for reply in replies for line in reply["problems"]})
    found = {size: file for reply in replies for file, size in sorted(reply["sizes"].items()) if size is not None}
    if len(found) > 1:
        problems.append(" and ".join(f"{file}: has vectors of {size} elements" for size, file in sorted(found.items())))
    for problem in problems[:1]:
        report_line(f"checkpoint {reader.name} is skipped: {problem}")
    return not problems


def _dealt(domains: StorageDomains, files: list[str]) -> list[str]:
    """This rank's share of files that all ranks of its volume could read."""
    sharers = [rank for rank, domain in enumerate(domains.of_rank) if domain == domains.mine]
    return files[sharers.index(domains.rank) :: len(sharers)]

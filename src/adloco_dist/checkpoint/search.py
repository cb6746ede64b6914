"""Which checkpoint a run resumes from: the newest that is whole and understood, wherever its parts lie."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adloco_dist.checkpoint.files import RECORDS_FILE, STATE_FILE, can_be_done_without, mapped_tensors, number_in
from adloco_dist.checkpoint.state import OtherVersionError, RunState
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
        """Where a part can be read while the block runs: its own path, or that of a copy from another node, which is
        removed at the end; what was mapped of it stays readable."""
        if file not in self.holders:
            raise DamagedError(f"{file}: is not in its {MANIFEST_FILE}")
        if not self.holders[file]:
            raise DamagedError(f"{file}: is nowhere any more")
        holders, path = self.holders[file], self.domains.folder / self.name / file
        if self.domains.volume in holders:
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
    control: ControlPlane, domains: StorageDomains, report_line: ReportLine, may_lack: bool = False
) -> tuple[CheckpointReader, RunState] | None:
    """The newest checkpoint whose parts are all somewhere and can be understood; newer ones are reported. Collective.
    Some of its files `may_lack`, which can be done without.

    Raises:
        SettingsError: on all ranks, when the folder of checkpoints cannot be read on one, or holds only those of
            another release.
    """
    manifests: dict[str, Any] = {}
    problems: dict[str, str] = {}
    with control.agreed():
        try:
            for path in domains.folder.iterdir() if domains.rank == domains.volume else ():
                if number_in(path.name) is not None:
                    try:
                        manifests[path.name] = encode(read_manifest(path))
                    except DamagedError as error:
                        problems[path.name] = str(error)
        except OSError as mistake:
            rule = f"{domains.folder} cannot be read ({mistake.strerror}); move it away, or name another"
            raise SettingsError(f"run.directory={domains.folder.parent}: {rule}") from mistake
    replies = control.exchange({"manifests": manifests, "problems": problems})
    everywhere = {name: parts for reply in replies for name, parts in reply["manifests"].items()}
    without = {(name, line) for reply in replies for name, line in reply["problems"].items()}
    for name, problem in sorted(without):
        if name not in everywhere:
            report_line(f"checkpoint {name} is skipped: {problem}")
    newest = max((number_in(name) or 0 for name in (*everywhere, *dict(without))), default=0)
    other_version = ""
    for name in sorted(everywhere, key=lambda name: number_in(name) or 0, reverse=True):
        try:
            manifest = decode(dict[str, Part], everywhere[name])
            reader = CheckpointReader(
                name, domains, manifest, _find_holders(control, domains, name, manifest, may_lack)
            )
            state = _read_state(control, reader)
            _check_tensors(control, reader, state)
        except OtherVersionError as error:
            other_version = str(error)
            report_line(f"checkpoint {name} is skipped: {STATE_FILE} {error}")
            continue
        except DamagedError as error:
            report_line(f"checkpoint {name} is skipped: {error}")
            continue
        # Numbers continue above all that were ever given, the damaged ones' too.
        checkpoint_id = replace(state.plan.last_checkpoint, number=newest)
        return reader, replace(state, plan=replace(state.plan, last_checkpoint=checkpoint_id))
    if other_version:
        remedy = "resume with the release that began the run, or name a new directory"
        raise SettingsError(f"run.directory={domains.folder.parent}: its checkpoint {other_version}; {remedy}")
    return None


def _find_holders(
    control: ControlPlane, domains: StorageDomains, name: str, manifest: Manifest, may_lack: bool
) -> dict[str, list[int]]:
    """The volumes that hold each part undamaged; the ranks of a volume share the reading. Collective; raises a
    DamagedError on all ranks where a part is nowhere that must be there."""
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
    nowhere = [file for file, where in holders.items() if not where]
    for file in [file for file in nowhere if not (may_lack and can_be_done_without(file))]:
        lines = sorted({reply["problems"][file] for reply in replies if file in reply["problems"]})
        raise DamagedError(" and ".join(lines))
    return holders


def _read_state(control: ControlPlane, reader: CheckpointReader) -> RunState:
    """The state in a checkpoint, as rank 0 reads it. Collective.

    Raises:
        DamagedError: it cannot be read or understood; on all ranks, as the next.
        OtherVersionError: another release wrote it.
    """
    message: dict[str, Any] = {}
    if control.rank == 0:
        try:
            message = {"state": reader.content(STATE_FILE).decode()}
        except (DamagedError, OSError, ValueError) as error:
            message = {"problem": str(error)}
    message = control.broadcast(message)
    try:
        if "problem" in message:
            raise DamagedError(message["problem"])
        return RunState.from_message(json.loads(message["state"]))
    except OtherVersionError:
        raise
    except (DamagedError, ValueError, RecursionError) as error:
        raise DamagedError(f"{STATE_FILE}: is not what this version writes ({error})") from error


def _check_tensors(control: ControlPlane, reader: CheckpointReader, state: RunState) -> None:
    """Raise a DamagedError on all ranks unless every file holds what the state says; read by those who hold it.
    Collective."""
    entries, domains = state.entries_by_file(), reader.domains
    problems = [f"{file}: is not in its {MANIFEST_FILE}" for file in sorted(entries.keys() - reader.manifest.keys())]
    for file in _dealt(domains, sorted(entries.keys() & reader.manifest.keys())):
        if domains.volume in reader.holders[file]:
            try:
                held = reader.read(file)
                problems += [f"{file}: has no {entry.name}" for entry in entries[file] if entry.name not in held]
            except (DamagedError, OSError) as error:
                problems.append(str(error))
    for problem in sorted({line for reply in control.exchange({"problems": problems}) for line in reply["problems"]}):
        raise DamagedError(problem)


def _dealt(domains: StorageDomains, files: list[str]) -> list[str]:
    """The files that this rank checks, of those that all ranks of its volume could read."""
    sharers = [rank for rank, domain in enumerate(domains.of_rank) if domain == domains.volume]
    return files[sharers.index(domains.rank) :: len(sharers)]

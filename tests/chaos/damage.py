"""Whether damage to a checkpoint is noticed: no damaged one is ever loaded, and the one before it is found instead.

A small pool is trained to two whole checkpoints, of which the newest is of the middle of a round. On a fresh copy of
them, one file is damaged: bits flipped, cut off, zeroed, emptied, removed, lengthened, exchanged with another. Then the
search that a resumed run begins with must tell which file of which checkpoint it is, and find the checkpoint before.
"""

import json
import random
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adloco_dist.checkpoint.files import CHECKPOINTS_DIRECTORY, number_in
from adloco_dist.checkpoint.resume import fresh_domains, resumed
from adloco_dist.checkpoint.writer import Checkpoints, CheckpointWriter
from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import ClusterSettings, Device, Settings
from adloco_dist.config.compose import compose
from adloco_dist.run.journal import Journal, MetricsFile
from adloco_dist.run.manifest import MANIFEST_FILE
from adloco_dist.setup.agreement import prepare
from adloco_dist.setup.parts import NamedParts
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import train
from helpers.resuming import StopAfterLooks

UPDATES = 4
OVERRIDES = (
    "model=nano", "model.overrides.hidden_size=16", "model.overrides.intermediate_size=16",
    "model.overrides.num_hidden_layers=1", "data.sequence_length=32", "algorithm=diloco", "batching.request=norm_test",
    "pool.trainers=2",
    "pool.workers_per_trainer=2", f"algorithm.updates_per_round={UPDATES}", "batching.local_batch=2",
    "batching.capacity=16", "budget=100rounds", "merge=none", "evaluation.every=null",
    "checkpoint.every=1rounds", "checkpoint.keep_last=2", "run.unfinished=resume", "tracking=none", "run.report=false",
)  # fmt: skip
WHOLE_ROUNDS = 3
BLOCK_BYTES = 64
FOLDER, AS_OLDER = "a folder in its place", "as in the older checkpoint"


LOOKS = WHOLE_ROUNDS * (4 * UPDATES + 1) + UPDATES + UPDATES // 2
"""For a request to stop, in the middle of the round after `WHOLE_ROUNDS`: one look before each update and each average;
then a worker and a half."""


def write_checkpoints(runtime: Runtime, settings: Settings, place: Place) -> None:
    """Train, as a rank does it, until the request to stop."""
    assert settings.run.directory
    directory = Path(settings.run.directory)
    directory.mkdir()
    layout, splits, objective, trajectory = prepare(settings, runtime, NamedParts())
    module = objective.build(torch.device("cpu"), in_bf16=False)
    pool = set_up_pool(settings, runtime, splits, objective, module, layout)
    journal = Journal([MetricsFile(directory)])
    with fresh_domains(runtime, directory, settings) as domains:
        writer = CheckpointWriter(domains, join_store(place), 1, settings.checkpoint, print)
        checkpoints = Checkpoints(writer, journal, directory, settings)
        stop = runtime.heartbeat.stop = StopAfterLooks(LOOKS)
        train(pool, find_plan_inputs(pool, layout, trajectory), journal, stop, checkpoints)
        writer.wait()
    journal.close()


# --- damage

Content = bytes | str | None
"""Of a file: as it is written; `FOLDER`; None: it is not there."""


@dataclass(frozen=True)
class Damage:
    """What becomes of a file."""

    file: str
    what: str
    content: Content

    def do(self, checkpoint: Path) -> None:
        path = checkpoint / self.file
        path.unlink()
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        elif self.content == FOLDER:
            path.mkdir()


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}


def positions(content: bytes) -> dict[str, int]:
    """The places of a file where damage could matter differently."""
    found = {"the first byte": 0, "the middle": len(content) // 2, "the last byte": len(content) - 1}
    if content[:1] == b"{":
        patterns = {"a digit": rb"\d", "a letter of a key": rb"\w+\":", "a colon": rb":", "whitespace": rb"\s",
                    "a quote": rb"\"", "a bracket": rb"[\]}]", "a length": rb"(?<=num_bytes\": )\d",
                    "a part's digest": rb"(?<=xxh3\": \")\w", "its own digest": rb"(?<=\"digest\": \")\w",
                    "a part's name": rb"trainer-\d"}  # fmt: skip
        matches = {name: re.search(pattern, content) for name, pattern in patterns.items()}
        return found | {name: match.start() for name, match in matches.items() if match}
    tensors = 8 + int.from_bytes(content[:8], "little")
    digit, letter = (re.compile(pattern).search(content, 9) for pattern in (rb"\d", rb"[a-z]"))
    assert digit and letter
    found |= {"the header's length": 1, "its highest byte": 7, "the header's brace": 8, "a digit": digit.start()}
    return found | {"a letter": letter.start(), "the header's end": tensors - 1, "the first tensor": tensors}


def damages(newest: Mapping[str, bytes], older: Mapping[str, bytes], rng: random.Random) -> Iterator[Damage]:
    """All kinds, of every file; without what would leave a file as it is."""
    names = list(newest)
    for file, content in newest.items():
        for where, at in positions(content).items():
            yield Damage(file, f"bit flipped in {where}", flipped(content, at, rng))
            yield Damage(file, f"cut off before {where}", content[:at])
            zeros = bytes(min(BLOCK_BYTES, len(content) - at))
            yield Damage(file, f"zeros from {where} on", content[:at] + zeros + content[at + len(zeros) :])
        other = names[(names.index(file) + 1) % len(names)]
        whole: dict[str, Content] = {
            "emptied": b"", "removed": None, FOLDER: FOLDER, "zero appended": content + b"\0",
            "line end appended": content + b"\n", "its content twice": 2 * content,
            AS_OLDER: older.get(file), f"the content of {other}": newest[other],
        }  # fmt: skip
        if content[:1] == b"{":
            whole["written in one line"] = json.dumps(json.loads(content), separators=(",", ":")).encode()
        yield from (Damage(file, what, damaged) for what, damaged in whole.items())


def more_damages(newest: Mapping[str, bytes], rng: random.Random) -> Iterator[Damage]:
    """Bits anywhere, without end."""
    while True:
        file = rng.choice(list(newest))
        at = rng.randrange(len(newest[file]))
        yield Damage(file, f"bit flipped in byte {at}", flipped(newest[file], at, rng))


def flipped(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


# --- the search


@dataclass(frozen=True)
class Search:
    """Looks for a checkpoint in copies of a run directory."""

    runtime: Runtime
    settings: Settings
    directory: Path
    newest: str

    def mistake(self, damaged: Mapping[str, Damage], wanted: str | None) -> str | None:
        """What is wrong with how it ends when checkpoints are damaged; None: nothing.

        Args:
            damaged: by the checkpoint's name.
            wanted: the checkpoint that must be found.
        """
        copy, detail = self.directory.with_name("copy"), list[str]()
        shutil.copytree(self.directory, copy)
        try:
            for name, damage in damaged.items():
                damage.do(copy / CHECKPOINTS_DIRECTORY / name)
            found, number = self._found(copy, detail)
        except Exception:  # whatever it is, it should have been a line
            return traceback.format_exc()
        finally:
            shutil.rmtree(copy)
        if found != wanted:
            return f"resumes from {found} instead of {wanted}; reported {detail}"
        if found and number != number_in(self.newest):
            return f"would give the number {number} + 1 to the next checkpoint"
        for name, damage in damaged.items():
            if wanted == self.newest:  # no other is looked at
                continue
            # A manifest may be whole, but the older one: it is the parts then that do not fit it.
            named = "" if (damage.file, damage.what) == (MANIFEST_FILE, AS_OLDER) else damage.file
            if not any(f"checkpoint {name} is skipped: " in line and named in line for line in detail):
                return f"does not tell about {name}, but {detail}"
        return None

    def _found(self, copy: Path, detail: list[str]) -> tuple[str | None, int]:
        settings = replace(self.settings, run=replace(self.settings.run, directory=str(copy)))
        with resumed(self.runtime, settings, detail.append) as source:
            if source is None:
                return None, 0
            for file in source.reader.manifest:
                whole = (self.directory / CHECKPOINTS_DIRECTORY / source.reader.name / file).read_bytes()
                assert source.reader.content(file) == whole, f"{file} is read with other content"
            return source.reader.name, source.state.plan.last_checkpoint.number


def measure_damage(minimum: int) -> dict[str, float]:
    """Damage a checkpoint in `least` ways or more; prints every one that is not noticed as it should be."""
    rng, missed, by_file = random.Random(0), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        place = Place(0, 1, 0, 1, 0, init_method=f"file://{Path(name) / 'rendezvous'}")
        directory = Path(name) / "run"
        settings = compose([*OVERRIDES, f"run.directory={directory}"])
        cluster = ClusterSettings(device=Device.cpu, threads_per_rank=1)
        with started(cluster, place, join_store(place), StopRequest()) as runtime:
            write_checkpoints(runtime, settings, place)
            checkpoints = sorted((directory / CHECKPOINTS_DIRECTORY).iterdir())
            (older, newest), names = map(contents, checkpoints), [path.name for path in checkpoints]
            search = Search(runtime, settings, directory, names[1])
            schema = json.loads(newest["state.json"])["schema"]["worker"]
            assert any(entry.get("is_progress") for entry in schema), "the newest is not of the middle of a round"
            assert search.mistake({}, names[1]) is None, "the newest is not found even if it is whole"
            cases = [one for one in damages(newest, older, rng) if one.content != newest[one.file]]
            random_ones = more_damages(newest, rng)
            cases += [next(random_ones) for _ in range(minimum - len(cases))]
            attempts: list[tuple[dict[str, Damage], str | None]] = [({names[1]: one}, names[0]) for one in cases]
            for one, other in zip(rng.sample(cases, 24), more_damages(older, rng), strict=False):
                attempts.append(({names[1]: one, names[0]: other}, None))
                attempts.append(({names[0]: other}, names[1]))
            for damaged, wanted in attempts:
                by_file.update(one.file for one in damaged.values())
                if mistake := search.mistake(damaged, wanted):
                    missed += 1
                    detail = "; ".join(f"{name}/{one.file}: {one.what}" for name, one in damaged.items())
                    print(f"failure, {detail}: {mistake}", flush=True)
    print("damaged:", ", ".join(f"{file} {number}" for file, number in sorted(by_file.items())))
    return {"damage_tried": len(attempts), "damage_missed": missed}

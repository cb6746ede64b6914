"""Whether a run outlives kill -9: shot down at any time and started again, it must end with the same weights.

The real command on two ranks of this machine. A run that nobody disturbs says what is right. Runs under fire lose the
driver or a rank, at a random time of their life or as a rank comes to some place (its outer step, the manifest, ...),
several times each, and resume with the same command. Weights are compared bit by bit; records, merges and result in all
but what comes from clocks. Kills that leave processes behind are reported as well.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import adloco_dist.checkpoint.writer as writer
import adloco_dist.launch.rank as launch_rank
import adloco_dist.launch.run as launch_run
import adloco_dist.round.steps as steps
import adloco_dist.train as train
from adloco_dist.checkpoint.files import CHECKPOINTS_DIRECTORY, number_in
from adloco_dist.cluster.heartbeat import Heartbeat
from adloco_dist.cluster.mail import Mail
from adloco_dist.run.directory import is_finished
from adloco_dist.run.manifest import MANIFEST_FILE
from helpers.commands import ROOT, processes_with, train_command

ROUNDS, KILLS_PER_RUN = 36, 4
COMMAND = train_command(
    "--nproc-per-node", "2", "model=nano", "data.sequence_length=32", "algorithm=diloco",
    "batching.request=norm_test", "pool.trainers=3", "pool.workers_per_trainer=2",
    "pool.placement=spread", "algorithm.updates_per_round=6", "batching.local_batch=2", "batching.max_batch=16",
    "batching.capacity=64", "merge.every_rounds=12", f"budget={ROUNDS}rounds",
    "evaluation.every=3rounds", "evaluation.sequences=8",
    "evaluation.final_sequences=8", "checkpoint.every=1rounds", "tracking=none", "run.report=false",
    "run.unfinished=resume",
    "run.directory=run",
)  # fmt: skip
HUNG_SECONDS = 300.0
GONE_SECONDS = 15.0  # after a kill
CLOCKS = (
    "seconds", "data_seconds", "elapsed_seconds", "rank_seconds", "utilisation", "resources", "plan", "worth",
)  # fmt: skip
START, END = "start: ", "end: "
CALLS = (
    (launch_rank, "join_store", START + "store"), (launch_rank, "started", START + "joining"),
    (launch_run, "survey_cluster", START + "survey"), (launch_run, "resumed", START + "search"),
    (launch_run, "_set_up_pool", START + "placement"), (launch_run, "restore_pool", START + "restoring"),
    (launch_run, "open_journal", START + "records"),
    (Mail, "gather", "report travels"), (Mail, "broadcast", "plan travels"), (steps, "regroup", "merge"),
    (Heartbeat, "enter", ""), (writer.CheckpointWriter, "begin", "snapshot"), (train, "finish", END + "evaluation"),
    (launch_run, "save_model", END + "model"), (writer.CheckpointWriter, "_write", "writing"),
    (writer, "write_manifest", "manifest"), (writer, "prune", "prune"),
)  # fmt: skip
"""What a rank calls when it comes to a place; heartbeats name their own."""
BACKGROUND = ("report travels", "plan travels", "writing", "manifest", "prune")
OF_RANK_0 = ("manifest", "prune", END + "model")
PLACES = ("inner phase", "outer step", "report", *(place for _, _, place in CALLS if place))
FOLDER, SHOT = "CHAOS_KILLS_FOLDER", "CHAOS_KILLS_SHOT"
"""In the environment of all processes of a start: its run's folder, and whom a rank shoots."""
HOOK = """
import os
if "RANK" in os.environ:
    try:
        from chaos.kills import Watch
        Watch()
    except BaseException:  # Python would print it, and go on unwatched
        import traceback
        traceback.print_exc()
        os._exit(99)
"""
MAX_MISSES = 30
"""Starts in a row that end before anybody is shot: a place that no run comes to."""


@dataclass(frozen=True)
class Shot:
    """Kills driver, rank 0 or rank 1 so long after the start, or after a rank has come to a place for the nth time."""

    victim: str
    delay_seconds: float
    place: str = ""
    rank: int = 0
    nth: int = 1


class Watch:
    """In a rank: notes where it stands, and shoots when it is asked to."""

    def __init__(self) -> None:
        rank, folder = int(os.environ["RANK"]), Path(os.environ[FOLDER])
        self._shot = Shot(**json.loads(os.environ[SHOT]))
        self._fired, self._left = folder / "fired", self._shot.nth if self._shot.rank == rank else 0
        self._file = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
        self._places = [START + "imports", ""]
        for owner, name, place in CALLS:
            setattr(owner, name, self._noted(getattr(owner, name), place))

    def _noted(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            now, where = place or arguments[1].partition(": ")[2], int(place in BACKGROUND)
            before, delay = self._places[where], self._shot.delay_seconds
            self._note(where, now)
            if now == self._shot.place:
                self._left -= 1
                if self._left == 0:
                    threading.Timer(delay, self._shoot).start() if delay else self._shoot()
            result = function(*arguments, **named)
            if where:
                self._note(where, before)
            return result

        return noted

    def _note(self, where: int, place: str) -> None:
        self._places[where] = place
        os.pwrite(self._file, " + ".join(filter(None, self._places)).ljust(80).encode(), 0)

    def _shoot(self) -> None:
        self._fired.touch()
        os.kill(os.getppid() if self._shot.victim == "driver" else os.getpid(), signal.SIGKILL)


def left_by(directory: Path) -> dict[str, Any]:
    """What a run that has ended leaves, without what comes from clocks: seconds, and how long they are in messages."""
    with (directory / "model" / "model.safetensors").open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    facts = json.loads((directory / "run.json").read_text())
    for record in (*rows, facts["result"]):
        record |= dict.fromkeys(CLOCKS)
    for counted, of_messages in [(facts["result"], "bytes_sent"), *((row["bytes_sent"], "control") for row in rows)]:
        counted[of_messages] = None
    return {"weights": weights, "records": rows, "merges": facts["merges"], "result": facts["result"]}


class Run:
    """A run in a folder of its own, start after start."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.directory = self.folder / "run"
        self.hits: list[str] = []  # where each kill found its victim
        self.problems: list[str] = []

    def newest(self) -> str | None:
        """The newest whole checkpoint."""
        whole = [path.parent.name for path in self.directory.glob(f"{CHECKPOINTS_DIRECTORY}/*/{MANIFEST_FILE}")]
        return max(whole, key=lambda name: number_in(name) or 0, default=None)

    def start(self, shot: Shot | None = None) -> bool:
        """Start the command, and wait for its end; whether it was killed."""
        newest, start, fired, process = self.newest(), time.time(), self.folder / "fired", self._begin(shot)
        is_timed, victim = shot is not None and not shot.place, shot.victim if shot else ""
        until = start + (shot.delay_seconds if shot and is_timed else HUNG_SECONDS)
        while process.poll() is None and not fired.exists() and time.time() < until:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(0.1, until - time.time())))
        if process.poll() is None and is_timed:
            fired.touch()
            victim = _kill(process.pid, victim)
        elif process.poll() is None and not fired.exists():
            self._report_line(f"did not end in {HUNG_SECONDS:g} s")
        paths = [self.folder / f"rank{rank}" for rank in (0, 1)]
        stood = [(path.exists() and path.read_text().strip()) or START + "imports" for path in paths]
        since = fired.stat().st_mtime if fired.exists() else time.time()
        seconds, code = self._clear(since), process.wait()
        lines = self._output().splitlines()
        detail = next((line for line in lines if "resumes from" in line), "nothing about a checkpoint")
        if newest and f"/{newest}" not in detail and any(line.startswith("round ") for line in lines):
            self._report_line(f"the newest whole checkpoint was {newest}, but it reported {detail!r}")
        if not fired.exists():
            self._report_line(f"ended by itself with code {code}") if code else None
            return False
        self.hits.append(stood[int(victim == "rank 1")])
        print(f"  {since - start:4.1f} s after a start from {newest or 'nothing'}: {victim} by {shot}; rank 0 in "
              f"{stood[0]}, rank 1 in {stood[1]}; all gone after {seconds:.1f} s", flush=True)  # fmt: skip
        return True

    def check(self, reference: dict[str, Any]) -> None:
        """Compare what it has left."""
        try:
            left = left_by(self.directory)
            self.problems += [f"other {name} than undisturbed" for name in reference if left[name] != reference[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.problems.append(f"left no result: {error!r}")

    def _begin(self, shot: Shot | None) -> "subprocess.Popen[bytes]":
        for name in ("rank0", "rank1", "fired"):
            (self.folder / name).unlink(missing_ok=True)
        environment = {**os.environ, FOLDER: str(self.folder), "TMPDIR": str(self.folder)}
        if shot:
            (self.folder / "sitecustomize.py").write_text(HOOK)
            paths = [str(self.folder), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), SHOT: json.dumps(vars(shot))}
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(COMMAND, cwd=self.folder, env=environment, stdout=output, stderr=output,
                                    stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    def _clear(self, since: float) -> float:
        """Wait until no process of the run is left, and kill those that stay; seconds `since` then."""
        while left := self._processes():
            patience = max(0.0, since + GONE_SECONDS - time.time())
            for process in psutil.wait_procs(left, timeout=patience)[1]:
                with suppress(psutil.NoSuchProcess):
                    who = f"process {process.pid} (RANK={process.environ().get('RANK')})"
                    print(f"failure: {who} was left {GONE_SECONDS:g} s after the next kill", flush=True)
                    process.kill()
        return time.time() - since

    def _processes(self) -> list[psutil.Process]:
        return processes_with(FOLDER, str(self.folder))

    def _report_line(self, problem: str) -> None:
        self.problems.append(f"{problem}; the end of its output:\n{self._output()[-1500:]}")

    def _output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


def _kill(driver: int, victim: str) -> str:
    """Kill the victim, or the driver where it has not started that rank; who it was."""
    pids = {"driver": driver}
    with suppress(psutil.Error):
        pids |= {f"rank {child.environ().get('RANK')}": child.pid for child in psutil.Process(driver).children()}
    victim = victim if victim in pids else "driver"
    os.kill(pids[victim], signal.SIGKILL)
    return victim


def measure_kills(count: int, seed: int) -> dict[str, float]:
    """Kill runs `count` times in all; prints every kill, and what went wrong."""
    rng, deck, hits, lost = random.Random(seed), list[str](), Counter[str](), 0
    reference, start = Run(), time.time()
    reference.start()
    life, wanted = time.time() - start, left_by(reference.directory)
    print(f"undisturbed: {life:.1f} s, weights {wanted['weights'][:16]}, {len(wanted['merges'])} merges", flush=True)
    shutil.rmtree(reference.folder)
    misses = 0
    while hits.total() < count:
        run = Run()
        while len(run.hits) < min(KILLS_PER_RUN, count - hits.total()) and not is_finished(run.directory):
            deck = deck or rng.sample([*PLACES, *len(PLACES) * [""]], 2 * len(PLACES))
            shot = _draw(rng, deck.pop(), life, run.newest())
            if run.start(shot):
                misses = 0
                continue
            deck.insert(0, shot.place)  # it was there no more
            misses += 1
            if misses > MAX_MISSES:
                raise RuntimeError(f"no run comes to any of {sorted(set(deck))}; {'; '.join(run.problems)}")
        if not is_finished(run.directory):
            run.start()
        run.check(wanted)
        hits.update(run.hits)
        lost += len(run.hits) if run.problems else 0
        for problem in run.problems:
            print(f"failure in {run.folder}: {problem}", flush=True)
        if not run.problems:
            shutil.rmtree(run.folder)
    print("hit in", ", ".join(f"{place}: {number}" for place, number in sorted(hits.items())))
    return {"kills_tried": hits.total(), "kills_lost": lost}


def _draw(rng: random.Random, place: str, life: float, newest: str | None) -> Shot:
    """A shot at a place, or, without one, at any time in what is left of the run's life."""
    if not place:  # about half of a life is its start
        done = int(newest.rpartition("-")[2]) / ROUNDS if newest else 0.0
        return Shot(rng.choice(["driver", "rank 0", "rank 1"]), rng.uniform(0.0, life * (1 - done / 2)))
    rank = 0 if place in OF_RANK_0 else rng.randrange(2)
    is_rare = place == "merge" or place.startswith((START, END))
    victim, delay = rng.choice(["driver", *2 * [f"rank {rank}"]]), rng.choice([0.0, rng.uniform(0.0, 0.03)])
    return Shot(victim, delay, place, rank, 1 if is_rare else rng.randint(1, 8))

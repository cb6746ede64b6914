"""Members that are killed, stopped and started again, in real processes: the rest go on."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from adloco_dist import DiLoCo, Members, OuterSGD, Wire
from adloco_dist.averaging.codecs import Signs, WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from helpers.plain import PLAIN, Tied, adamw, batch, update, values
from helpers.ports import two_places
from helpers.processes import forked

UPDATES = 4
LAST_ROUNDS = 10
"""After all that a test does."""
SILENCE_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
WIRES = {
    "fp32": (Wire(), OuterSGD()),
    "in 4 bits, delayed": (Wire(Quantized(WholeNumbers(4)), delay_updates=2), OuterSGD()),
    "signs in fragments": (Wire(Quantized(Signs(), keeps_residual=True), fragments=2), PLAIN),
}


@dataclass(frozen=True)
class Told:
    """What a member says at the end of a round."""

    round: int
    members: int
    """Those that average; 0: it has ended."""
    weights: Sequence[float] = ()
    """Of the anchor, at the end."""


def train(pipe: Connection, meet: str, seed: int, wire: str, updates: int, least: int) -> None:
    """Train as a member; say what there is after every round, and go on when told to, until the round that is named."""
    torch.set_num_threads(1)
    module = Tied()
    optimizers = adamw(module)
    (travels, outer), number = WIRES[wire], 0
    members = Members(meet, silence_seconds=SILENCE_SECONDS, least=least)
    try:
        diloco = DiLoCo(module, optimizers, updates, outer, wire=travels, members=members)
    except ValueError as error:
        pipe.send(str(error))
        return

    with diloco:
        while True:
            pipe.send(Told(diloco.round, len(members.group.ranks) if members.group else 1))
            if pipe.recv() == diloco.round:
                break
            before = diloco.round
            while diloco.round == before:
                update(module, optimizers, batch(seed, number))
                number += 1
        diloco.outer_step()
    pipe.send(Told(diloco.round, 0, values(module).tolist()))


@dataclass
class Started:
    """The members that a test has started, by name."""

    meet: str
    wire: str
    pipes: dict[str, Connection] = field(default_factory=dict[str, Connection])
    processes: dict[str, BaseProcess] = field(default_factory=dict[str, BaseProcess])
    last: dict[str, Told] = field(default_factory=dict[str, Told])
    """What those who have ended have said last."""
    refusals: list[str] = field(default_factory=list[str])
    round: int = 0
    """The latest that any has told."""
    final: int | None = None
    """The last one of all."""

    def start(self, name: str, updates: int = UPDATES, least: int = 1) -> None:
        ours, theirs = forked.Pipe()
        arguments = (theirs, self.meet, len(self.pipes), self.wire, updates, least)
        self.processes[name] = forked.Process(target=train, args=arguments, daemon=True)
        self.processes[name].start()
        theirs.close()
        self.pipes[name] = ours

    def run(self, until: Callable[[str, Told], bool]) -> str:
        """Let all go on until one of them says what is waited for, and has not gone on yet; its name."""
        while True:
            ready = wait(self.pipes.values(), timeout=PATIENCE_SECONDS)
            assert ready, f"nobody says anything any more of {list(self.pipes)}"
            for name, pipe in list(self.pipes.items()):
                if pipe not in ready:
                    continue
                told = self._received(name, pipe)
                if told is None:
                    continue
                if until(name, told):
                    return name
                self.go_on(name)

    def _received(self, name: str, pipe: Connection) -> Told | None:
        try:
            told = pipe.recv()
        except (EOFError, ConnectionResetError):  # it was killed, or has ended
            del self.pipes[name]
            return None
        if isinstance(told, Told) and told.members:
            self.round = max(self.round, told.round)
            return told
        del self.pipes[name]
        if isinstance(told, Told):
            self.last[name] = told
        else:
            self.refusals.append(told)
        return None

    def go_on(self, name: str) -> None:
        with suppress(BrokenPipeError):  # it was killed
            self.pipes[name].send(self.final)

    def together(self, members: int) -> None:
        """Let all go on until one of them averages with so many."""
        self.go_on(self.run(lambda _, told: told.members == members))

    def end(self) -> None:
        """Let all go on to the end."""
        self.final = self.round + LAST_ROUNDS
        while self.pipes:
            ready = wait(self.pipes.values(), timeout=PATIENCE_SECONDS)
            assert ready, f"nobody says anything any more of {list(self.pipes)}"
            for name, pipe in list(self.pipes.items()):
                if pipe in ready and self._received(name, pipe):
                    self.go_on(name)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def signal(self, name: str, number: signal.Signals) -> None:
        process_id = self.processes[name].pid
        assert process_id
        os.kill(process_id, number)


@contextmanager
def started(wire: str = "fp32") -> Iterator[Started]:
    members = Started(two_places(), wire)
    try:
        yield members
    finally:
        for process in members.processes.values():
            process.kill()
            process.join()


def assert_alike(members: Started, names: Sequence[str]) -> None:
    """These have ended, after as many rounds, with the same weights."""
    assert sorted(members.last) == sorted(names)
    first, *others = [members.last[name] for name in names]
    for other in others:
        assert other == first


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("lost", ["a", "b"])
def test_one_is_killed_and_started_again(wire: str, lost: str) -> None:
    with started(wire) as members:
        members.start("a")
        members.go_on(members.run(lambda name, _: name == "a"))  # it has begun, and keeps the roll
        members.start("b")
        members.start("c")
        members.together(3)
        members.kill(lost)
        members.together(2)
        members.start("again")
        members.together(3)
        members.end()
        assert_alike(members, [*({"a", "b", "c"} - {lost}), "again"])


def test_two_are_killed_at_once_and_the_last_goes_on_alone() -> None:
    with started() as members:
        for name in "abc":
            members.start(name)
        members.together(3)
        members.kill("a")
        members.kill("c")
        members.together(1)
        members.end()
        assert_alike(members, ["b"])


@pytest.mark.parametrize("name", ["a", "b"])
def test_one_that_stood_still_comes_back_as_a_newcomer(name: str) -> None:
    with started() as members:
        members.start("a")
        members.go_on(members.run(lambda name, _: name == "a"))
        members.start("b")
        members.start("c")
        members.together(3)
        members.signal(name, signal.SIGSTOP)
        members.together(2)
        members.signal(name, signal.SIGCONT)
        members.together(3)
        members.end()
        assert_alike(members, ["a", "b", "c"])


def test_one_with_other_settings_is_refused_and_the_others_know_nothing_of_it() -> None:
    with started() as members:
        members.start("a")
        members.start("b")
        members.together(2)
        members.start("other", updates=UPDATES + 1)
        members.go_on(members.run(lambda *_: bool(members.refusals)))
        members.end()
        (line,) = members.refusals
        assert line.startswith("members: updates_per_round differs")
        assert_alike(members, ["a", "b"])


def test_fewer_than_the_least_wait() -> None:
    with started() as members:
        alone = []
        members.start("a", least=2)
        members.start("b", least=2)
        members.go_on(members.run(lambda name, told: alone.append(told.members) or name == "b"))
        members.kill("a")
        members.start("again", least=2)
        members.run(lambda name, told: alone.append(told.members) or (name == "again" and told.members == 2))
        members.go_on("again")
        members.end()
        assert 1 not in alone
        assert_alike(members, ["b", "again"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"meet": "here"}, "meet: 'here' is no HOST:PORT"),
        ({"meet": "a:1,b"}, "meet: 'b' is no HOST:PORT"),
        ({"meet": "a:1", "listen": "b:x"}, "listen: 'b:x' is no HOST:PORT"),
        ({"meet": "a:1", "silence_seconds": 0}, "silence_seconds=0: must be > 0"),
        ({"meet": "a:1", "least": 0}, "least=0: must be a whole number >= 1"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Members(**arguments)


def test_members_and_a_group_are_refused() -> None:
    module, group = Tied(), cast(dist.ProcessGroup, object())
    with pytest.raises(ValueError, match="members: they are instead of a group; give one of both"):
        DiLoCo(module, adamw(module), group=group, members=Members("127.0.0.1:29999"))


def test_an_address_of_another_machine_is_refused() -> None:
    module = Tied()
    members = Members("127.0.0.1:29999", listen="192.0.2.1:29400")
    with pytest.raises(ValueError, match=r"listen: this process cannot listen at 192\.0\.2\.1:29400"):
        DiLoCo(module, adamw(module), members=members)

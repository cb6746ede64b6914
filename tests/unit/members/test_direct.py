"""Groups of a generation: what befalls who waits for a process that stands still in the middle of a message."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from adloco_dist.members.direct import BreakableGroup, connected
from adloco_dist.members.roll import Generation
from adloco_dist.members.seat import Seat

ELEMENTS = 25_000_000
"""More than sockets hold."""
PATIENCE = timedelta(seconds=30)


def group_of(seat: Seat, generation: Generation) -> BreakableGroup:
    return connected(seat, generation, torch.device("cpu"), timeout_seconds=300, patience=PATIENCE)


def stand_still(parent: Connection) -> None:
    """Begin to receive from the other one, and stop."""
    seat = Seat([], "127.0.0.1:0", {}, silence_seconds=5, least=1)
    parent.send(seat.address)
    group = group_of(seat, parent.recv())
    receive = group.process_group.recv([torch.empty(ELEMENTS)], 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    receive.wait()


def break_off_a_wait(group: BreakableGroup) -> None:
    while not group._waits:
        time.sleep(0.001)
    group.break_off()


def test_who_waits_for_the_end_of_a_message_is_freed() -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    seat = Seat([], "127.0.0.1:0", {}, silence_seconds=5, least=1)
    other = spawn.Process(target=stand_still, args=(there,), daemon=True)
    other.start()
    try:
        generation = Generation(1, (seat.address, here.recv()))
        seat.begin(generation)
        here.send(generation)
        group = group_of(seat, generation)
        assert other.pid
        os.waitpid(other.pid, os.WUNTRACED)  # until it has stopped
        threading.Thread(target=break_off_a_wait, args=(group,), daemon=True).start()
        with pytest.raises(RuntimeError, match=r"broken off|closure"):
            group.send_and_receive([(1, torch.ones(ELEMENTS))], [])
        group.close()
    finally:
        os.kill(other.pid or 0, signal.SIGKILL)
        seat.close()

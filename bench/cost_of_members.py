"""What it costs the rest when members of an own loop are lost and come: three real hosts (root), clock on the wall.

One event at a time, in turn: a process is killed, or that of who keeps the roll, or a host's link is cut. Beyond a
usual round, how long until the rest have ended the next one? Whoever was lost comes back before the next event.
"""

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from helpers.hosts import Host, hosts
from helpers.member import OnHosts, on_hosts

HOSTS = 3
EVENTS = ("library_leave_seconds", "library_first_lost_seconds", "library_leave_silent_seconds")
"""By figure: a process that is killed, the first's, and a link that is cut."""


def seconds_beside_a_round(members: OnHosts, rest: list[Host], number: int, since: float) -> float:
    """From an event to the end of the next round of so many members, less a round."""
    ended = max(members.wait(host, number, after=since).at for host in rest)
    before = [one.at for one in members.rounds(rest[0]) if one.at < since]
    return ended - since - statistics.median(later - earlier for earlier, later in pairwise(before))


def longest_beside_a_round(members: OnHosts, host: Host, since: float) -> float:
    """The longest round of a host that has ended since, less a usual one."""
    ends = [one.at for one in members.rounds(host)]
    rounds = [(later - earlier, later) for earlier, later in pairwise(ends)]
    return max(length for length, end in rounds if end > since) - statistics.median(length for length, _ in rounds)


def measure_members(count: int) -> dict[str, float]:
    """The median seconds of `count` events of each kind, and the most; and how many rounds members have ended with
    different weights."""
    found: dict[str, list[float]] = {name: [] for name in (*EVENTS, "library_join_seconds")}
    differing = 0
    with tempfile.TemporaryDirectory() as folder, hosts(HOSTS) as made, on_hosts(made, Path(folder)) as members:
        order = list(made)
        """As members stand in the roll."""
        for event in EVENTS * count:
            lost = order[0] if event == "library_first_lost_seconds" else order[-1]
            order.remove(lost)
            is_cut, since = event == "library_leave_silent_seconds", time.time()
            if is_cut:
                lost.cut()
            else:
                members.kill(lost)
            found[event].append(seconds_beside_a_round(members, order, HOSTS - 1, since))
            differing += len(members.differing(order))
            if is_cut:
                members.wait(lost, 1, after=since)
                lost.mend()
            since = time.time()
            if not is_cut:
                members.start(lost)
            for host in (*order, lost):
                members.wait(host, HOSTS, after=since)
            if not is_cut:
                found["library_join_seconds"].append(longest_beside_a_round(members, order[0], since))
            order.append(lost)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {f"{name}_most": max(values) for name, values in found.items()} | {"library_differing": differing}

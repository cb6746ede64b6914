"""The nodes of a run that come and go: who is there now, and which ranks their processes are among them.

A node is a member of a generation (members/roll.py): its first rank speaks for it, and the others of the node follow.
Each generation has a store, groups and ranks of its own. Processes live on from one to the next.
"""

import ipaddress
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)
from torch.distributed.distributed_c10d import Store

from adloco_dist.averaging.checks import is_of_another
from adloco_dist.cluster.contact import BreakableContact
from adloco_dist.cluster.heartbeat import patient_client
from adloco_dist.cluster.meeting import Meeting, Terms
from adloco_dist.cluster.runtime import STORE_SECONDS, Place
from adloco_dist.config import SettingsError
from adloco_dist.members.calls import address_towards, split
from adloco_dist.members.direct import GenerationStore
from adloco_dist.members.roll import Generation
from adloco_dist.members.seat import LAST_SECONDS, LOOK_SECONDS, Seat
from adloco_dist.text import counted

LAST_CALL_SECONDS = 5.0
"""How long a run that could begin waits for more nodes, which were started with it."""
LOOK_EVERY_SECONDS = 1.0
"""Between two looks at who is there."""
ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way there is the one to other machines."""
BETWEEN = "between two generations"


class Node:
    """This process' node among the others.

    Attributes:
        contact: with the ranks of the present generation.
        generation: its number.
        has_idle: whether some ranks have nothing to do before a round begins anew.
        change: who has gone and come since the one before, in a line; None: it is the first.
        has_new: whether it has nodes that were not in the one before, in which this one was.
    """

    contact: BreakableContact
    generation = 0
    change: str | None = None
    has_idle = has_new = False

    def __init__(
        self,
        meeting: Meeting,
        place: Place,
        local: Store,
        facts: Mapping[str, str],
        terms: Terms,
        silence_seconds: float,
    ) -> None:
        """
        Args:
            place: this process', as torchrun says, among those of the node.
            local: the store that these share.
            facts: what all nodes have to have in common.
            terms: what is told to nodes that want to take part.
            silence_seconds: a node that was not heard of for so long is lost.
        """
        self._meeting, self._here, self._local = meeting, place, patient_client(local)
        self._facts, self._terms, self._silence = facts, terms, silence_seconds
        self._number = 0
        """Of the generation, as this node counts them."""
        self._seat: Seat | None = None
        """Of the rank that speaks for the node."""
        self._server: TCPStore | None = None
        self._names: dict[str, str] = {}
        """Host name of every node, by address."""
        self._has_newcomers = self._is_watched = False
        self.contact = BreakableContact((), ())

    def next(self) -> tuple[Place, Store]:
        """This process' place among all that are there now, and the store that they share. It waits for all ranks of
        this node to come here, and for all nodes that are left.

        Raises:
            SettingsError: on all ranks of the node, when the others do not come at the start, or have other settings;
                or this one cannot listen.
        """
        number, self._number, self._server = self._number, self._number + 1, None
        self.has_idle = False
        self._local.add(f"came/{number}", 1)
        if self._here.local_rank == 0:
            while self._local.add(f"came/{number}", 0) < self._here.local_world_size:
                time.sleep(LOOK_SECONDS)
            self._local.set(f"place/{number}", json.dumps(self._meet()))
        message = json.loads(self._local.get(f"place/{number}"))
        if "error" in message:
            raise SettingsError(message["error"])
        host, port, sizes, node = message["host"], message["port"], message["sizes"], message["node"]
        self.contact = BreakableContact(message["hosts"], message["kept_ports"])
        self.generation = message["generation"]
        self.change = _change(self._names, message["names"]) if self._names else None
        self.has_new = bool(self._names) and not set(message["names"]) <= set(self._names)
        self._names = message["names"]
        if self._seat:
            self._is_watched = True
            threading.Thread(target=self._watch, args=(self._seat, self.contact), name="nodes", daemon=True).start()
        place = Place(
            rank=sum(sizes[:node]) + self._here.local_rank,
            world_size=sum(sizes),
            local_rank=self._here.local_rank,
            local_world_size=self._here.local_world_size,
            node=node,
            num_nodes=len(sizes),
            host=host,
        )
        seconds = timedelta(seconds=STORE_SECONDS)
        return place, TCPStore(host, port, is_master=False, timeout=seconds, wait_for_workers=False)

    def has_newcomers(self) -> bool:
        """Whether nodes wait for a place, on the rank that gives it to them, or others have no part yet."""
        return self._has_newcomers or self.has_idle

    def rest(self) -> None:
        """Look for nobody any more in this generation, which ends in agreement."""
        self._is_watched = False

    def leave(self) -> None:
        """Take part in nothing any more."""
        if self._seat:
            self._seat.close()

    def in_words(self) -> str:
        """Whom this node waits for, while nobody trains."""
        where = f"waiting at {', '.join(self._meeting.addresses)} for {self._meeting.wanted}"
        roll = self._seat and self._seat.roll
        if roll and (here := {*roll.here, *roll.asking} - {self._seat and self._seat.address}):
            others = f"{counted(len(here), 'other')} {'is' if len(here) == 1 else 'are'} here"
            return f"{where}: {others}; start the same command on the rest"
        return f"{where}; start the same command on each, and open that port"

    def _meet(self) -> Mapping[str, object]:
        """What the ranks of this node need of the next generation; or why there is none, under "error"."""
        try:
            seat = self._seat = self._seat or self._take_seat()
            generation = seat.next() if self.generation else seat.find_place()
            while True:
                seat.deadline = None
                seat.begin(generation)
                self._has_newcomers = False
                try:
                    return self._place_in(seat, generation)
                except RuntimeError as error:
                    if not is_of_another(error):
                        raise
                generation = seat.next()  # another one is gone meanwhile
        except ValueError as error:
            return {"error": f"--rdzv-endpoint={','.join(self._meeting.addresses)}: {error}"}
        except TimeoutError:
            remedy = "start the same command on every node, and check that this host and port can be reached from all"
            rule = f"did not bring together {self._meeting.wanted} within {self._meeting.seconds:g} s; {remedy}"
            return {"error": f"--rdzv-endpoint={','.join(self._meeting.addresses)}: {rule}"}

    def _take_seat(self) -> Seat:
        """Take this node's seat; all that may come are awaited at first, and then as many as have to be there."""
        meeting = self._meeting
        addresses = [_reachable(address, meeting.own_host) for address in meeting.addresses]
        facts, silence, most = self._facts, self._silence, meeting.most
        own_host = meeting.own_host and split(_reachable(f"{meeting.own_host}:0", None))[0]
        seat = Seat(addresses, None, facts, silence, most, most=most, is_one=True, own_host=own_host)
        seat.roll.terms = asdict(self._terms)
        seat.deadline, seat.wait_seconds = time.monotonic() + meeting.seconds, meeting.seconds
        last_call = threading.Timer(LAST_CALL_SECONDS, setattr, (seat, "least", meeting.least))
        last_call.daemon = True
        last_call.start()
        return seat

    def _place_in(self, seat: Seat, generation: Generation) -> Mapping[str, object]:
        """Where this node's ranks stand in a generation. Collective over its nodes; raises a RuntimeError where one is
        gone."""
        members, own = generation.members, seat.address
        known, (own_host, _) = GenerationStore(seat, generation), split(own)
        told: dict[str, Any] = {"ranks": self._here.local_world_size, "name": platform.node()}
        if own == members[0]:
            seconds = timedelta(seconds=STORE_SECONDS)
            self._server = TCPStore(own_host, 0, is_master=True, timeout=seconds, wait_for_workers=False)
            told["port"] = self._server.port
        known.set(own, json.dumps(told).encode())
        known.wait(members, timedelta(seconds=STORE_SECONDS))
        of_member = [json.loads(known.get(member)) for member in members]
        hosts, ports = zip(*map(split, members), strict=True)
        return {
            "host": hosts[0],
            "port": of_member[0]["port"],
            "sizes": [each["ranks"] for each in of_member],
            "node": members.index(own),
            "generation": generation.number,
            "names": {member: each["name"] for member, each in zip(members, of_member, strict=True)},
            "hosts": hosts,
            "kept_ports": [*ports, int(os.environ["MASTER_PORT"])],
        }

    def _watch(self, seat: Seat, contact: BreakableContact) -> None:
        """Look whether the nodes of the present generation are there, until it is over: one that has ended is missed
        here, whatever the others do; one that is silent, by the heartbeat."""
        generation = seat.roll.generation
        assert generation
        looks = 0
        while self._is_watched and seat.roll.generation is generation:
            if (line := self._who_is_gone(seat, generation)) and self._is_watched:
                contact.lose(line, BETWEEN)
                return
            looks += 1
            others = seat.others if seat.keeps_roll else []
            if others and (other := seat.larger(others[looks % len(others)], generation, LAST_SECONDS)):
                with seat.lock:
                    seat.yields_to, seat.roll.moved_to = other, other.members[0]
                contact.lose(f"{len(other.members)} nodes are together at {other.members[0]}", BETWEEN)
                return
            time.sleep(LOOK_EVERY_SECONDS)

    def _who_is_gone(self, seat: Seat, generation: Generation) -> str | None:
        """A node of the generation whose process has ended or has gone on to another one, in words; the first looks at
        all, the others at it."""
        first = generation.members[0]
        is_full = len(generation.members) >= self._meeting.most
        if seat.keeps_roll:
            asking = () if is_full else tuple(seat.roll.asking)
            self._has_newcomers = any(seat.ask(address, "who", seconds=LAST_SECONDS) for address in asking)
        if seat.roll.is_over:
            return "the nodes meet again"
        for address in generation.members[1:] if seat.keeps_roll else [first]:
            reply = seat.ask(address, "who", seconds=LAST_SECONDS)
            newest = Generation.of(reply["generation"]) if reply else None
            if reply is None and address not in seat.mute:
                return f"node {address}: its process has ended"
            if reply and (reply["has_left"] or newest is None or newest.name != generation.name):
                return f"node {address}: it has gone on without this one, or started again"
            if reply and reply["is_over"] and address == first:
                return "the nodes meet again"
        return None


def _change(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Who has gone and come, by address and name."""
    gone = [name for address, name in before.items() if address not in after]
    come = [name for address, name in after.items() if address not in before]
    changes = [f"{', '.join(names)} {what}" for names, what in ((gone, "lost"), (come, "new")) if names]
    return f"{'; '.join(changes) or 'all are there again'}; training goes on with {counted(len(after), 'node')}"


def _reachable(address: str, own_host: str | None) -> str:
    """HOST:PORT with the host's address as others know it: Debian's name of a machine itself is a loopback's."""
    host, port = split(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    is_own = ipaddress.ip_address(found).is_loopback and host != "localhost" and host != found
    return f"{(own_host or address_towards(ELSEWHERE) or found) if is_own else found}:{port}"

"""The network before any process group uses it: the interface of every node, and whether each pair of them connects.

gloo connects every rank with every other one on ports that the kernel chooses. Where that cannot work it waits for its
timeout and then names no node; here it is tried first, with plain sockets, and reported in one line.
"""

import ipaddress
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from adloco_dist.addresses import refusal
from adloco_dist.config import SettingsError
from adloco_dist.members.calls import address_towards

CONNECT_SECONDS = 10.0
"""A node that does not answer within this counts as out of reach."""
NODE_SECONDS = 120.0
"""Nodes whose ranks have started wait this long for what the others find."""

REMEDY = "open all ports between nodes, or set cluster.interface (docs/guide/network.md)"


@dataclass(frozen=True)
class Interface:
    """Where a node can be reached by the others."""

    name: str
    address: str


def join_network(
    store: Store, node: int, num_nodes: int, speaks: bool, wanted: str | None, store_host: str
) -> Interface | None:
    """Settle on this node's interface, configure gloo and NCCL, and make sure that all nodes reach each other.

    The interface is the `wanted` one, else what GLOO_SOCKET_IFNAME says, else the one that leads to the other nodes;
    None on a single node for which none was set. The rank of a node that `speaks` tries the connections. `store_host`
    holds the store.

    Raises:
        SettingsError: on every rank, when an interface is not there or two nodes cannot connect.
    """
    setting = "cluster.interface" if wanted else "GLOO_SOCKET_IFNAME"
    wanted = wanted or os.environ.get("GLOO_SOCKET_IFNAME")
    if num_nodes == 1 and wanted is None:
        return None
    interface, error = None, None
    try:
        interface = _named(setting, wanted) if wanted else _towards(store_host)
    except SettingsError as mistake:
        error = str(mistake)
    if speaks:
        _post(store, f"candidate/{node}", interface.address if interface else "")
    if not wanted and (interface is None or _is_loopback(interface.address)):
        # The rendezvous's own host may have found its loopback; the way to the other nodes is meant.
        others = [_read(store, f"candidate/{other}") for other in range(num_nodes) if other != node]
        reachable = [other for other in others if other and not _is_loopback(other)]
        interface = _towards(reachable[0]) if reachable else interface  # else all nodes are on one machine
    if interface is None and error is None:
        here = socket.gethostname()
        error = f"cluster.interface=null: no interface of {here} leads to {store_host}; name one"
    if speaks and interface is not None:
        _try_connections(store, node, num_nodes, interface)
    elif speaks:
        _post(store, f"address/{node}", None)
        _post(store, f"result/{node}", [error])
    for other in range(num_nodes):
        for line in _read(store, f"result/{other}"):
            raise SettingsError(line)
    assert interface is not None
    os.environ["GLOO_SOCKET_IFNAME"] = interface.name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.name}")  # without the sign, all that begin like this
    return interface


def check_store() -> None:
    """Try to reach torchrun's store, which listens by now, before a client of it waits for its timeout; raises a
    SettingsError where it cannot be reached."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if reason := refusal(host, int(port), CONNECT_SECONDS):
        line = f"MASTER_ADDR={host}, MASTER_PORT={port}: cannot be reached from {socket.gethostname()}"
        remedy = f"{REMEDY}, or, if an earlier torchrun has left them, unset TORCHELASTIC_RUN_ID"
        raise SettingsError(f"{line} ({reason}); {remedy}")


def _interfaces() -> dict[str, str]:
    """The address of every interface of this machine that has one; IPv4 where there are both."""
    address_of = {}
    for name, addresses in psutil.net_if_addrs().items():
        by_family = {entry.family: entry.address.partition("%")[0] for entry in addresses}
        if address := by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6):
            address_of[name] = address
    return address_of


def _named(setting: str, name: str) -> Interface:
    address_of = _interfaces()
    if name not in address_of:
        rule = f"{socket.gethostname()} has no such interface with an address, but {', '.join(sorted(address_of))}"
        raise SettingsError.of(setting, name, rule)
    return Interface(name, address_of[name])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _towards(host: str) -> Interface | None:
    """The interface from which packets to `host` leave; none are sent."""
    address_here = address_towards(host)
    names = [name for name, address in _interfaces().items() if address == address_here]
    return Interface(names[0], address_here) if address_here and names else None


def _try_connections(store: Store, node: int, num_nodes: int, interface: Interface) -> None:
    """Listen where gloo would, connect to all other nodes that have an interface, and post what failed."""
    here = socket.gethostname()
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    with socket.create_server((interface.address, 0), family=family, backlog=num_nodes) as server:
        _post(store, f"address/{node}", {**asdict(interface), "port": server.getsockname()[1], "host": here})
        peers = [_read(store, f"address/{other}") for other in range(num_nodes) if other != node]
        with ThreadPoolExecutor(max_workers=32) as pool:
            failures = list(pool.map(_failure, filter(None, peers)))
        errors = [f"{here} ({interface.name} {interface.address}) cannot reach {line}" for line in failures if line]
        _post(store, f"result/{node}", errors)
        for other in range(num_nodes):  # the server must outlive what the others try
            _read(store, f"result/{other}")


def _failure(peer: dict[str, Any]) -> str | None:
    """Why `peer` cannot be reached; None if it can."""
    reason = refusal(peer["address"], peer["port"], CONNECT_SECONDS)
    return reason and f"{peer['host']} at {peer['address']}:{peer['port']} ({peer['name']}): {reason}; {REMEDY}"


def _post(store: Store, key: str, value: object) -> None:
    store.set(f"network/{key}", json.dumps(value))


def _read(store: Store, key: str) -> Any:
    try:
        store.wait([f"network/{key}"], timedelta(seconds=NODE_SECONDS))
    except DistStoreError as error:
        node = key.rpartition("/")[2]
        rule = f"its ranks did not answer within {NODE_SECONDS:g} s; see what they say on that node"
        raise SettingsError(f"node {node}: {rule}") from error
    return json.loads(store.get(f"network/{key}"))

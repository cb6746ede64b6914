"""Ports for processes that are yet to begin."""

import random
import socket

LEAST, MOST = 20_000, 32_000
"""Below those that Linux gives to connections: one of these may be taken before the process that it is for begins."""


def free_port() -> int:
    """A port of the loopback at which nobody listens."""
    while True:
        port = random.SystemRandom().randint(LEAST, MOST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def two_places() -> str:
    """Where members of one machine look for each other."""
    return f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"

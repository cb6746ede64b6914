"""Whether another machine can be found and reached, known within seconds: libraries try for a minute, or for ever."""

import socket
import threading

RESOLVE_SECONDS = 10.0
"""A name server that does not answer within this is reported like a name that it does not know."""
CONNECT_SECONDS = 5.0


def out_of_reach(host: str, port: int) -> str | None:
    """Why nothing can be reached at `port` of `host`; None if something can."""
    return unresolved(host) or refusal(host, port, CONNECT_SECONDS)


def refusal(host: str, port: int, timeout_seconds: float) -> str | None:
    """Why no connection can be made to `port` of a host that has an address; None if one can."""
    try:
        socket.create_connection((host, port), timeout=timeout_seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def unresolved(host: str) -> str | None:
    """Why `host` has no address here; None if it has one."""
    reasons = [f"no answer of a name server within {RESOLVE_SECONDS:.0f} s"]

    def resolve() -> None:
        try:
            socket.getaddrinfo(host, None)
            reasons.clear()
        except (OSError, UnicodeError) as error:
            reasons[0] = getattr(error, "strerror", None) or str(error)

    thread = threading.Thread(target=resolve, name="resolve", daemon=True)  # it cannot be stopped
    thread.start()
    thread.join(RESOLVE_SECONDS)
    return reasons[0] if reasons else None

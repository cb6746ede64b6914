"""Which of a node's failures its driver names as the cause."""

import json
import signal
import socket
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from adloco_dist.cluster.failures import LostContactError, PeerFailedError, RankFailedError, failed
from adloco_dist.launch.agent import report_cause

HOST = socket.gethostname()
OWN = "RankFailedError: rank 0 on a, waiting for rank 1 on a (stuck), round 2: DistBackendError: timed out"
LOST = "LostContactError: rank 0 on a, round 2: RuntimeError: Connection closed by peer"
PEER = "PeerFailedError: rank 7 on b, round 2: ValueError: broken"


@pytest.mark.parametrize(
    ("ends", "detail"),
    [
        # By rank: the exit code, and what the rank has recorded.
        ([(1, OWN), (-signal.SIGABRT, None)], f"error: {OWN.partition(': ')[2]}"),
        ([(-signal.SIGABRT, OWN)], f"error: {OWN.partition(': ')[2]}"),
        ([(-signal.SIGTERM, None), (1, OWN)], f"error: {OWN.partition(': ')[2]}"),
        ([(1, LOST), (-signal.SIGKILL, None)], f"error: rank 1 on {HOST}: ended by SIGKILL; was memory short?"),
        ([(1, PEER), (-signal.SIGSEGV, None)], f"error: rank 1 on {HOST}: ended by SIGSEGV"),
        ([(1, LOST), (-signal.SIGTERM, None)], f"error: {LOST.partition(': ')[2]}"),
        ([(1, PEER), (-signal.SIGTERM, None)], f"ended on {HOST}: {PEER.partition(': ')[2]}"),
        ([(3, None)], f"error: rank 0 on {HOST}: ended with code 3"),
    ],
)
def test_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: list[tuple[int, str | None]], detail: str
) -> None:
    failures = {}
    for rank, (code, recorded) in enumerate(ends):
        file = tmp_path / f"{rank}.json"
        if recorded:
            file.write_text(json.dumps({"message": {"message": recorded, "extraInfo": {"timestamp": "1"}}}))
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))
    assert report_cause(failures) == 1
    assert capsys.readouterr().err == f"{detail}\n"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[pair.cc:554] Connection closed by peer [127.0.0.1]:9"), LostContactError),
        (
            torch.distributed.DistNetworkError("got 0 bytes. Connection was likely closed."),
            LostContactError,
        ),
        (RuntimeError("Operation timed out!"), RankFailedError),
        (ValueError("connection closed"), RankFailedError),
    ],
)
def test_who_fails_first_says_whether_it_only_lost_contact(error: Exception, kind: type[Exception]) -> None:
    store = HashStore()
    assert type(failed(error, "rank 0 on a", store)) is kind
    assert type(failed(error, "rank 1 on a", store)) is PeerFailedError

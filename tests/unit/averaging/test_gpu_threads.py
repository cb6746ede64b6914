"""What averages ask of CUDA, on a machine without it: which device, in which thread, in how many streams.

torch's functions are replaced here by ones that note how they were called; gpu/cases_averages.py calls the real ones.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from adloco_dist.averaging import background
from adloco_dist.averaging.background import Background
from adloco_dist.averaging.group import Group, GroupError, RankSet, is_staged
from adloco_dist.averaging.shards import Shards
from adloco_dist.cluster.runtime import Runtime
from helpers.processes import run_ranks

GPU = torch.device("cuda", 3)


class Stream:
    """A stream that notes what it is told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.calls.append(("wait_stream", other))

    def wait_event(self, event: Any) -> None:
        self.calls.append(("wait_event", event))

    def record_event(self) -> Any:
        event = object()
        self.calls.append(("record_event", event))
        return event


class Cuda:
    """torch.cuda as averages use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.present = Stream(GPU)
        self.streams: list[Stream] = []
        self.calls: list[tuple[str, str, Any]] = []
        """Threads, functions and arguments, in their order."""
        background._stream_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "Stream", self._new)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self._note("set_device", device))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.present)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self._note("empty_cache", None))

    def _note(self, name: str, argument: Any) -> None:
        self.calls.append((threading.current_thread().name, name, argument))

    def _new(self, device: torch.device) -> Stream:
        self.streams.append(Stream(device))
        return self.streams[-1]

    def _stream(self, stream: Any) -> AbstractContextManager[None]:
        self._note("stream", stream)
        return nullcontext()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Cuda(monkeypatch)
    background._stream_of.cache_clear()


def test_averages_follow_one_another_in_one_stream_of_their_device(cuda: Cuda) -> None:
    for number in range(100):
        assert Background(lambda number=number: torch.tensor(number), GPU).wait() == number
    (stream,) = cuda.streams
    assert stream.device == GPU
    by_thread = cuda.calls[:2]
    assert by_thread == [("average", "set_device", GPU), ("average", "stream", stream)], "the device first"
    assert len(cuda.calls) == 200


def test_an_average_waits_for_the_present_stream_which_waits_for_its_end_alone(cuda: Cuda) -> None:
    """The present stream waits for an event, not for the stream: a later average may be on its way there."""
    goes_on = threading.Event()

    def second() -> torch.Tensor:
        goes_on.wait()
        return torch.ones(())

    one = Background(lambda: torch.zeros(()), GPU).begin()
    other = Background(second, GPU).begin(after=one)
    one.wait()
    (stream,) = cuda.streams
    assert [call for call in stream.calls if call[0] == "wait_stream"] == [("wait_stream", cuda.present)] * 2
    (recorded,) = [event for name, event in stream.calls if name == "record_event"]
    assert cuda.present.calls == [("wait_event", recorded)]
    goes_on.set()
    other.wait()
    assert len(cuda.present.calls) == 2


def test_an_average_on_a_cpu_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("CUDA is started")

    for name in ("Stream", "stream", "set_device", "current_stream", "current_device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert Background(lambda: torch.ones(()), torch.device("cpu")).wait() == 1


def num_threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_an_average_takes_one_core_and_leaves_all_others_theirs() -> None:
    """While it travels and afterwards, of the main thread and of threads that begin then."""
    before, goes_on, has_begun = torch.get_num_threads(), threading.Event(), threading.Event()
    inside: list[int] = []

    def call() -> torch.Tensor:
        inside.append(torch.get_num_threads())
        has_begun.set()
        goes_on.wait()
        return torch.ones(())

    torch.set_num_threads(3)
    try:
        average = Background(call, torch.device("cpu")).begin()
        has_begun.wait()
        beside = [torch.get_num_threads(), num_threads_of_a_new_thread()]
        goes_on.set()
        average.wait()
        assert inside == [1]
        assert beside == [3, 3]
        assert [torch.get_num_threads(), num_threads_of_a_new_thread()] == [3, 3]
    finally:
        torch.set_num_threads(before)


class FakeBackend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class FakeProcessGroup:
    """Of rank 0."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def rank(self) -> int:
        return 0

    def _get_backend(self, device: torch.device) -> FakeBackend:
        return FakeBackend(self._backend)


def group_of_rank_0(monkeypatch: pytest.MonkeyPatch, ranks: RankSet, backend: str, device: torch.device) -> Group:
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    return Group(ranks, FakeProcessGroup(backend), device, 5, 5)  # pyright: ignore[reportArgumentType]


def test_a_new_group_of_a_gpu_connects_on_that_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, device: torch.device) -> None:
        cuda.calls.append((threading.current_thread().name, "zeros", device))
        raise RuntimeError("no further")

    monkeypatch.setattr(torch, "zeros", refuse)
    group = group_of_rank_0(monkeypatch, (0, 1), "nccl", GPU)
    with pytest.raises(GroupError, match="no further"):
        group.connect()
    assert [call for call in cuda.calls if call[0] == "connect"] == [
        ("connect", "set_device", GPU), ("connect", "zeros", GPU),
    ]  # fmt: skip


def test_a_group_of_a_gpu_says_which() -> None:
    with pytest.raises(AssertionError):
        Group((0, 1), None, torch.device("cuda"), 5, 5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("device", "backend", "travels_on"),
    [("cuda:3", "gloo", "cpu"), ("cuda:3", "nccl", "cuda:3"), ("cpu", "gloo", "cpu")],
)
def test_gloo_sends_and_receives_no_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, travels_on: str
) -> None:
    posted: list[tuple[str, torch.Tensor]] = []

    def post(operations: list[tuple[str, torch.Tensor]]) -> None:
        posted.extend(operations)
        raise RuntimeError("nothing travels")  # into memory that is not there

    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, rank, group: (kind.__name__, tensor))
    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    group = group_of_rank_0(monkeypatch, (0, 1, 2), backend, torch.device(device))
    group._is_connected = True
    with FakeTensorMode():
        own, one, other = (torch.ones(4, device=device) for _ in range(3))
        with pytest.raises(RuntimeError, match="nothing travels"):
            group.send_and_receive([(1, own), (2, own)], [(1, one), (2, other)])
    assert [kind for kind, _ in posted] == ["irecv", "irecv", "isend", "isend"], "receives are posted first"
    assert {tensor.device for _, tensor in posted} == {torch.device(travels_on)}
    assert posted[2][1] is posted[3][1], "copied once"
    assert (posted[2][1] is own) == (travels_on == device), "copied only where it has to be"


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [("cuda:0", "gloo", True), ("cuda:0", "nccl", False), ("cpu", "gloo", False), ("cpu", "mpi", False)],
)
def test_what_is_staged(device: str, backend: str, expected: bool) -> None:
    assert is_staged(torch.device(device), backend) is expected


def stage_everything(runtime: Runtime) -> dict[str, Any]:
    """As of a GPU whose memory gloo does not send: the same numbers arrive, in the tensors that were given."""
    found: dict[str, Any] = {}
    for staged in (False, True):
        group = Group(tuple(range(runtime.world_size)), dist.group.WORLD, torch.device("cpu"), 60, 60)  # pyright: ignore[reportArgumentType]
        if staged:
            group._near = lambda tensor, is_filled=True: tensor.clone() if is_filled else torch.full_like(tensor, -1)
        mine = torch.arange(runtime.world_size * 5.0).view(-1, 5) + 100 * runtime.rank
        received = torch.zeros_like(mine)
        group.exchange_tensors(mine.unbind(), received.unbind())
        found[str(staged)] = received.tolist()
    return found


def test_what_passes_through_cpu_memory_arrives_where_it_belongs() -> None:
    for found in run_ranks(stage_everything, [0, 0, 0]):
        assert found["True"] == found["False"]
        assert -1 not in [number for row in found["True"] for number in row]


def worker_of_two(runtime: Runtime) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    here = Shards({"weight": part, "whole": torch.ones(2)}, (), 60)
    assert here.total(1) == 2
    object.__setattr__(mesh, "_device_type", "cuda")  # with parts in CPU memory, as CPUOffloadPolicy leaves them
    torch.cuda.current_device = lambda: 3
    elsewhere = Shards({"weight": part, "whole": torch.ones(2)}, (), 60)
    return [str(group.device) for one in (here, elsewhere) for group in one._groups]


def test_ranks_that_hold_a_worker_together_exchange_tensors_where_their_parts_are() -> None:
    """With an index: a thread that asks for "cuda" alone takes the first GPU, on every rank."""
    assert run_ranks(worker_of_two, [0, 0]) == [["cpu", "cuda:3"]] * 2


def test_a_part_on_a_gpu_says_which() -> None:
    from adloco_dist.averaging.shards import _device

    with FakeTensorMode():
        parts = [torch.ones(2), torch.ones(3, device="cuda:2")]
        assert _device("cuda", parts) == torch.device("cuda", 2)

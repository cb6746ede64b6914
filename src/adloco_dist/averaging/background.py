"""A collective that goes on while updates are computed."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import record_function

from adloco_dist.averaging.group import use_device

T = TypeVar("T")


class Background(Generic[T]):
    """A call that is made in a thread of its own, on a GPU in a stream for such calls, once it is begun.

    Calls that follow one another are made one after the other, so that all ranks issue their collectives in one order;
    nobody else may use their groups meanwhile. The thread takes one core while it encodes and decodes; gloo's own
    thread moves the bytes, and both sleep while they wait for the link.

    Attributes:
        seconds: how long the call took, once `wait` has returned.
        waited_seconds: how long `wait` blocked.
    """

    def __init__(self, call: Callable[[], T], device: torch.device) -> None:
        self.seconds = self.waited_seconds = 0.0
        self._call, self._device = call, device
        self._after: Background[Any] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._done: torch.Event | None = None
        # A daemon: a process that ends for another reason does not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, name="average", daemon=True)

    def begin(self, after: "Background[Any] | None" = None) -> "Background[T]":
        """Begin the call, after another one; it may use what the present stream was given before."""
        self._after = after
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._thread.start()
        return self

    def wait(self) -> T:
        """Block until the call, which is begun now if it was not, has returned; the present stream may use its result.

        What the call has raised is raised here.
        """
        start = time.perf_counter()
        if self._thread.ident is None:
            self.begin()
        self._thread.join()
        self.waited_seconds += time.perf_counter() - start
        if self._error is not None:
            raise self._error
        if self._done:  # not for the stream, in which a later call may have begun
            torch.cuda.current_stream(self._device).wait_event(self._done)
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        if self._after is not None:
            self._after._thread.join()
            self._after = None
        start = time.perf_counter()
        try:
            _take_one_core()  # the others train
            use_device(self._device)
            # torch's own context starts CUDA, of no stream, too.
            stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
            with stream, record_function("transfer"):  # its name in a profile
                self._result = self._call()
            self._done = self._stream.record_event() if self._stream else None
        except BaseException as error:  # raised by the thread that waits
            self._error = error
        self.seconds = time.perf_counter() - start


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a GPU for calls beside updates.

    torch keeps freed memory for the stream that it was used in: one for every call would keep what a call takes 32
    times, for as many streams does torch hand out.
    """
    return torch.cuda.Stream(device)


def _take_one_core() -> None:
    """Let the calling thread compute on one core, and no other thread.

    torch.set_num_threads sets what its thread has, and what all threads have that begin later (docs/lab-notes.md). A
    thread that ends at once puts the latter back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,), name="restore")
    restoring.start()
    restoring.join()

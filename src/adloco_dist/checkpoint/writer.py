"""Checkpoints written in the background, from a snapshot: training waits for the copy alone."""

import json
import logging
import shutil
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from adloco_dist.checkpoint.files import prune
from adloco_dist.checkpoint.storage import StorageDomains
from adloco_dist.checkpoint.tensor_file import StagingBuffer
from adloco_dist.cluster.heartbeat import own_client
from adloco_dist.config import CheckpointSettings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.plan import CheckpointId
from adloco_dist.run.manifest import MANIFEST_FILE, Part, write_content, write_manifest
from adloco_dist.text import reason

log = logging.getLogger(__name__)
Snapshot = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by file and name."""
PATIENCE = timedelta(hours=24)
"""How long rank 0 waits for ranks that write; those that die are noticed elsewhere."""


class CheckpointWriter:
    """Writes this rank's parts, and on rank 0 the manifest once all ranks have written theirs.

    Ranks notify rank 0 through the store, from the background, so that a checkpoint is whole as soon as its last part
    is, not only after the next round. What cannot be written leaves the last whole checkpoint where it is.
    """

    def __init__(
        self,
        domains: StorageDomains,
        store: Store,
        world_size: int,
        settings: CheckpointSettings,
        report_line: Callable[[str], None],
    ) -> None:
        """
        Args:
            report_line: takes one line for the user, on rank 0, from any thread.
        """
        self.domains, self._settings, self._report_line = domains, settings, report_line
        self._store = own_client(store)
        self._store.set_timeout(PATIENCE)
        self._world_size = world_size
        # One thread for the whole run: a new one must get a turn on cores that train before start() returns.
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._buffers: dict[str, StagingBuffer] = {}
        self.newest: str | None = None
        """Name of the newest whole checkpoint of this start, on rank 0; None: none yet, or another rank."""

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def begin(self, checkpoint_id: CheckpointId, parts: Snapshot, contents: Mapping[str, bytes]) -> None:
        """Copy `parts` and write them; returns when they are copied.

        Args:
            parts: the tensors of this rank's files; they may change as soon as this returns.
            contents: this rank's other files.
        """
        self.wait()
        self._buffers = {file: self._buffers.get(file, StagingBuffer()) for file in parts}
        for file, tensors in parts.items():
            self._buffers[file].fill(tensors)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._writing = self._background.submit(self._write, checkpoint_id, self._buffers, contents)

    def wait(self) -> None:
        """Wait until this rank's work on the last checkpoint is done."""
        if self._writing:
            self._writing.result()

    def _write(
        self, checkpoint_id: CheckpointId, images: Mapping[str, StagingBuffer], contents: Mapping[str, bytes]
    ) -> None:
        folder = self.domains.folder / checkpoint_id.name
        report: dict[str, object] = {}
        try:
            written = {file: buffer.write(folder / file) for file, buffer in images.items()}
            written |= {file: write_content(folder / file, content) for file, content in contents.items()}
            report["parts"] = encode(written)
        except Exception as error:  # whatever it is, rank 0 must hear of it
            log.exception("checkpoint %s", checkpoint_id.name)
            report["error"] = _in_words(error)
            written = {}
        if self._settings.copies and (buddy := self.domains.buddy) is not None:
            try:
                for file in written:
                    self.domains.send(buddy, f"{folder.name}/{file}", folder / file)
            except OSError as error:  # the part is still where it was written
                report["note"] = f"without its copy on another node: {_in_words(error)}"
        try:
            self._store.set(_key(checkpoint_id, self.domains.rank), json.dumps(report))
            if self.domains.rank == 0:
                self._conclude(checkpoint_id, folder)
        except Exception:  # the store is gone, and the run with it; or worse, which the log shows
            log.exception("checkpoint %s", checkpoint_id.name)

    def _conclude(self, checkpoint_id: CheckpointId, folder: Path) -> None:
        """Write the manifest on all volumes, or report why there is none."""
        manifest: dict[str, Part] = {}
        errors: list[str] = []
        for rank in range(self._world_size):
            report = json.loads(self._store.get(_key(checkpoint_id, rank)))
            self._store.delete_key(_key(checkpoint_id, rank))
            manifest |= decode(dict[str, Part], report.get("parts", {}))
            errors += [f"rank {rank}: {report['error']}"] if "error" in report else []
            if "note" in report:
                self._report_line(f"checkpoint {checkpoint_id.name}, rank {rank}: {report['note']}")
        try:
            if not errors:
                write_manifest(folder, manifest)
        except OSError as error:
            errors.append(f"rank 0: {_in_words(error)}")
        if errors:
            kept = f"the newest whole one is {self.newest}" if self.newest else "there is none yet"
            self._report_line(f"checkpoint {checkpoint_id.name} could not be written, {kept}: {errors[0]}")
            shutil.rmtree(folder, ignore_errors=True)  # all ranks have ended their part: room for what else is written
            return
        self.newest = checkpoint_id.name
        for domain in self.domains.all:
            if domain != self.domains.mine:
                try:
                    self.domains.send(domain, f"{folder.name}/{MANIFEST_FILE}", folder / MANIFEST_FILE)
                except OSError as error:
                    self._report_line(f"checkpoint {checkpoint_id.name}: {_in_words(error)}")
        prune(self.domains.folder, self._settings)
        log.info("checkpoint %s is whole", checkpoint_id.name)


def _key(checkpoint_id: CheckpointId, rank: int) -> str:
    return f"checkpoint/{checkpoint_id.name}/{rank}"


def _in_words(error: Exception) -> str:
    return f"{socket.gethostname()}: {reason(error)}"

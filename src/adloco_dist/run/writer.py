"""Checkpoints written in the background, from a snapshot: training waits for the copy alone."""

import json
import logging
import shutil
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from adloco_dist.cluster.heartbeat import own_client
from adloco_dist.cluster.volumes import Volumes
from adloco_dist.config import CheckpointSettings
from adloco_dist.decisions.checkpointing import Mark
from adloco_dist.run.image import Image
from adloco_dist.run.parts import MANIFEST_FILE, Part, prune, write_content, write_manifest

log = logging.getLogger(__name__)
Snapshot = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by file and name."""
PATIENCE = timedelta(hours=24)
"""For ranks that write; those that die are noticed elsewhere."""


class CheckpointWriter:
    """Writes this rank's parts, and on rank 0 the manifest once all ranks have written theirs.

    Ranks tell rank 0 through the store, from the background, so that a checkpoint is whole as soon as its last part
    is, not only after the next round. What cannot be written leaves the last whole checkpoint where it is.
    """

    def __init__(
        self, volumes: Volumes, store: Store, world_size: int, settings: CheckpointSettings, tell: Callable[[str], None]
    ) -> None:
        """
        Args:
            store: shared by all ranks; used from a thread of its own, through a client of its own.
            tell: takes one line for the user, on rank 0, from any thread.
        """
        self._volumes, self._settings, self._tell = volumes, settings, tell
        self._store = own_client(store)
        self._store.set_timeout(PATIENCE)
        self._world_size = world_size
        # One thread for the whole run: a new one must get a turn on cores that train before start() returns.
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._images: dict[str, Image] = {}
        self.newest: str | None = None
        """On rank 0: the name of the newest whole checkpoint of this start."""

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def has_several_volumes(self) -> bool:
        """Whether nodes have directories of their own."""
        return self._volumes.buddy is not None

    def begin(self, mark: Mark, parts: Snapshot, contents: Mapping[str, bytes]) -> None:
        """Copy `parts` and write them; returns when they are copied.

        Args:
            parts: the tensors of this rank's files; they may change as soon as this returns.
            contents: this rank's other files.
        """
        self.wait()
        self._images = {file: self._images.get(file, Image()) for file in parts}
        for file, tensors in parts.items():
            self._images[file].fill(tensors)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._writing = self._background.submit(self._write, mark, self._images, contents)

    def wait(self) -> None:
        """Until this rank's work on the last checkpoint is done."""
        if self._writing:
            self._writing.result()

    def _write(self, mark: Mark, images: Mapping[str, Image], contents: Mapping[str, bytes]) -> None:
        folder = self._volumes.folder / mark.name
        report: dict[str, object] = {}
        try:
            written = {file: image.write(folder / file) for file, image in images.items()}
            written |= {file: write_content(folder / file, content) for file, content in contents.items()}
            report["parts"] = {file: asdict(part) for file, part in written.items()}
        except Exception as error:  # whatever it is, rank 0 must hear of it
            log.exception("checkpoint %s", mark.name)
            report["error"] = _in_words(error)
            written = {}
        if self._settings.copies:
            report["note"] = self._copy_to_buddy(folder, list(written))
        try:
            self._store.set(_key(mark, self._volumes.rank), json.dumps(report))
            if self._volumes.rank == 0:
                self._conclude(mark, folder)
        except Exception:  # the store is gone, and the run with it; or worse, which the log tells
            log.exception("checkpoint %s", mark.name)

    def _copy_to_buddy(self, folder: Path, files: list[str]) -> str | None:
        """Why not, where it fails: the part is still where it was written."""
        buddy = self._volumes.buddy
        if buddy is None:
            return None
        try:
            for file in files:
                self._volumes.send(buddy, f"{folder.name}/{file}", folder / file)
        except OSError as error:
            return f"without its copy on another node: {_in_words(error)}"
        return None

    def _conclude(self, mark: Mark, folder: Path) -> None:
        """Write the manifest on all volumes, or tell why there is none."""
        manifest: dict[str, Part] = {}
        errors: list[str] = []
        for rank in range(self._world_size):
            report = json.loads(self._store.get(_key(mark, rank)))
            self._store.delete_key(_key(mark, rank))
            manifest |= {file: Part(**part) for file, part in report.get("parts", {}).items()}
            errors += [f"rank {rank}: {report['error']}"] if "error" in report else []
            if report.get("note"):
                self._tell(f"checkpoint {mark.name}, rank {rank}: {report['note']}")
        try:
            if not errors:
                write_manifest(folder, manifest)
        except OSError as error:
            errors.append(f"rank 0: {_in_words(error)}")
        if errors:
            kept = f"the newest whole one is {self.newest}" if self.newest else "there is none yet"
            self._tell(f"checkpoint {mark.name} could not be written, {kept}: {errors[0]}")
            shutil.rmtree(folder, ignore_errors=True)  # all ranks have ended their part: room for what else is written
            return
        self.newest = mark.name
        for volume in self._volumes.all:
            if volume != self._volumes.mine:
                try:
                    self._volumes.send(volume, f"{folder.name}/{MANIFEST_FILE}", folder / MANIFEST_FILE)
                except OSError as error:
                    self._tell(f"checkpoint {mark.name}: {_in_words(error)}")
        prune(self._volumes.folder, self._settings)
        log.info("checkpoint %s is whole", mark.name)


def _key(mark: Mark, rank: int) -> str:
    return f"checkpoint/{mark.name}/{rank}"


def _in_words(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{socket.gethostname()}: {told}"

"""Makes this checkout importable where nothing of it is installed."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASE = "ADLOCO_GPU_CASE"
"""In the environment of a case's process and of all that it starts: which case."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, code that asks torch for GPUs when it is imported does not start CUDA, which no forked process could use."""


@contextmanager
def checkout_on_path() -> Iterator[None]:
    """Put the package, the benchmarks and the tests on the path of this process and of those that it starts.

    The groups of conf/ are part of an installed package; so they are of this one, which is made of links.
    """
    os.environ[NVML_CHECK] = "1"
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "adloco_dist"
        package.mkdir()
        for entry in (ROOT / "src" / "adloco_dist").iterdir():
            (package / entry.name).symlink_to(entry)
        (package / "conf").symlink_to(ROOT / "conf")
        paths = [folder, str(ROOT / "bench"), str(ROOT / "tests")]
        sys.path[:0] = paths
        already = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, already] if already else paths)
        yield

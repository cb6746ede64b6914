"""The noise scale needs torch alone: it is imported, and measures, where nothing else of this package's can be."""

import subprocess
import sys
from pathlib import Path

import adloco_dist

LAUNCHERS_OWN = (
    "hydra", "omegaconf", "transformers", "datasets", "tokenizers", "wandb", "numpy", "psutil", "pyarrow", "rich",
    "safetensors", "xxhash", "matplotlib", "pynvml",
)  # fmt: skip
PROGRAM = f"""
import sys

for name in {LAUNCHERS_OWN}:
    sys.modules[name] = None  # an import of it raises

import adloco_dist

assert "torch" not in sys.modules, "the launcher refuses mistakes before torch is imported"
from adloco_dist import NoiseScale
import torch

model = torch.nn.Linear(3, 1)
noise = NoiseScale(model)
for _ in range(4):
    model(torch.randn(2, 3)).square().mean().backward()
    noise.observe(2)
print(noise.update())
assert {{name for name in sys.modules if name.startswith("adloco_dist.")}} <= {{
    "adloco_dist.noise", "adloco_dist.noise_scale", "adloco_dist.vectors",
    *(f"adloco_dist.noise.{{name}}" for name in
      ("statistics", "estimation", "sketch", "requests", "gradients")),
}}
from adloco_dist import *
assert "torch.distributed.fsdp" not in sys.modules, "its import takes half as long as torch's"
try:
    adloco_dist.Nothing
except AttributeError as error:
    print(error)
"""


def test_torch_is_all_it_needs() -> None:
    source = str(Path(adloco_dist.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {source!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("noise scale ")
    assert lines[1] == "module 'adloco_dist' has no attribute 'Nothing'"

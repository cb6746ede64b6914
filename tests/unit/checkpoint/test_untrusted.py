"""Reading what somebody else has made executes no code."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.checkpoint.files import mapped_tensors
from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.objective.architecture import model_config
from adloco_dist.objective.models import build_model
from adloco_dist.run.manifest import DamagedError, check_part, digest_of, read_manifest
from adloco_dist.tools.finished import load_model
from helpers.support import small_module, small_settings


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A model directory with weights to unpickle and code to import, each of which would leave a file `fired`."""
    fired, directory = tmp_path / "fired", tmp_path / "run" / "model"
    small_module(small_settings()).save_pretrained(directory)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(fired)))
    code = f"from pathlib import Path\nPath({str(fired)!r}).touch()\n"
    (directory / "modeling_trap.py").write_text(code)
    return directory


def with_remote_code(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    names = {"AutoConfig": "modeling_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "trap", "auto_map": names}))


@pytest.mark.parametrize("kind", ["pickled weights", "remote code"])
def test_a_model_directory(trap: Path, tmp_path: Path, kind: str) -> None:
    (trap / "model.safetensors").unlink()
    if kind == "remote code":
        with_remote_code(trap)
    with pytest.raises(SettingsError, match=r"RUN=.*cannot be read"):
        load_model(trap.parent, small_settings())
    settings = compose(["model=pretrained", f"model.warm_start={trap}"])
    with pytest.raises(SettingsError, match=r"model.warm_start=.*cannot be read"):
        build_model(settings.model, model_config(settings.model, Vocabulary(23), 12), 0)
    assert not (tmp_path / "fired").exists()


def test_a_checkpoint(tmp_path: Path) -> None:
    part, fired = tmp_path / "trainer-0.safetensors", tmp_path / "fired"
    part.write_bytes(pickle.dumps(Bomb(fired)))
    check_part(tmp_path, part.name, digest_of(part))  # with a manifest to fit it
    with pytest.raises(DamagedError, match=r"trainer-0.safetensors: holds no tensors \(.*[Hh]eader"):
        mapped_tensors(part, part.name)
    (tmp_path / "manifest.json").write_bytes(pickle.dumps(Bomb(fired)))
    with pytest.raises(DamagedError):
        read_manifest(tmp_path)
    assert not fired.exists()


def test_a_setting_names_no_class() -> None:
    for line in ("+model.overrides._target_=os.system", "+inner._target_=os.system", "model._target_=os.system"):
        with pytest.raises(SettingsError):
            settings = compose(["model=causal", "model.architecture=gpt2", line])
            model_config(settings.model, Vocabulary(23), 12)

"""Models as settings name them: shapes, output layers, how they are computed."""

from pathlib import Path

import pytest
import torch
from support import SEQUENCE_LENGTH, VOCAB_SIZE, first_sequences, small_settings
from transformers import PreTrainedModel

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.models import build_model, losses, model_config
from adloco_dist.pool.lane import new_lane
from adloco_dist.round.gradient import accumulate_gradient

CPU = torch.device("cpu")


def built(settings: Settings, seed: int = 0) -> PreTrainedModel:
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    return build_model(settings.model, config, seed)


def gradient(settings: Settings) -> torch.Tensor:
    lane = new_lane(built(settings), CPU, settings)
    lane.flat_model.point_at(lane.flat_model.initial_weights())
    accumulate_gradient(lane.flat_model, lane.module, first_sequences(4), None)
    return lane.flat_model.gradient


@pytest.mark.parametrize(
    ("model", "num_parameters"), [("microllama", 304_636_928), ("llama_1b", 1_100_048_384), ("gpt2", 124_439_808)]
)
def test_published_shapes(model: str, num_parameters: int) -> None:
    """With their own vocabularies; TinyLlama's and GPT-2's counts are those of their cards."""
    settings = compose([f"model={model}"])
    size = 50257 if model == "gpt2" else 32000
    config = model_config(settings.model, Vocabulary(size), 1024)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's own compiler
@pytest.mark.parametrize("way", ["model.gradient_checkpointing=true", "model.attention=eager", "model.compile=true"])
def test_ways_to_compute_the_same_gradient(way: str) -> None:
    torch.testing.assert_close(gradient(small_settings(way)), gradient(small_settings()), rtol=0, atol=1e-9)


def test_a_model_from_another_run_its_shape_alone_or_with_a_new_output_layer(tmp_path: Path) -> None:
    untied = "+model.overrides.tie_word_embeddings=false"
    source = built(small_settings(untied), seed=5)
    source.save_pretrained(tmp_path)
    warm = ("model=pretrained", f"model.warm_start={tmp_path}", "model.architecture=null", "model.overrides={}")

    def loaded(*more: str, seed: int = 0) -> PreTrainedModel:
        settings = compose([*warm, *more])
        return build_model(settings.model, model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH), seed)

    batch = first_sequences(2)
    assert torch.equal(losses(loaded(), batch), losses(source, batch))
    fresh = loaded("model.from_scratch=true", seed=5)
    assert fresh.config.n_embd == source.config.n_embd
    other = loaded("model.from_scratch=true", seed=6)
    assert not torch.equal(losses(fresh, batch), losses(other, batch))
    reset, again, elsewhere = (loaded("model.reset_output=true", seed=seed) for seed in (1, 1, 2))
    states = [model.state_dict() for model in (source, reset, again, elsewhere)]
    heads = [state["lm_head.weight"] for state in states]
    assert torch.equal(heads[1], heads[2]), "the same on all ranks, for they share the seed"
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[3])
    assert 0.5 < float(heads[1].std() / heads[0].std()) < 2, "drawn as the model draws it"
    assert torch.equal(states[0]["transformer.wte.weight"], states[1]["transformer.wte.weight"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.reset_output=true"], ["model.reset_output=true", "tied"]),
        (["model.attention=nonsense"], ["model.attention=nonsense"]),
        (["model.from_scratch=true"], ["model.from_scratch=True", "model.warm_start"]),
        (["model.gradient_checkpointing=true", "batching.request=norm_test", "batching.estimator=per_sequence"],
         ["model.gradient_checkpointing", "per_sequence"]),
        (["model.compile=true", "algorithm=ddp", "pool.trainers=1"], ["model.compile", "algorithm=ddp"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        built(small_settings(*overrides))
    assert all(word in str(caught.value) for word in words), caught.value

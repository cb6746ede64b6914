"""Models as settings name them: shapes, output layers, how they are computed."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from adloco_dist.checkpoint.model import save_model
from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.objective.architecture import local_model, model_config
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.losses import losses
from adloco_dist.objective.models import build_model, num_parameters, try_shape
from adloco_dist.pool.capacity import state_bytes
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import mean_gradient
from adloco_dist.pool.slot import new_slot
from helpers.support import SEQUENCE_LENGTH, VOCAB_SIZE, first_sequences, small_objective, small_settings

CPU = torch.device("cpu")


def built(settings: Settings, seed: int = 0) -> PreTrainedModel:
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    return build_model(settings.model, config, seed)


def gradient(settings: Settings) -> torch.Tensor:
    objective = LanguageObjective.fitted(settings, Vocabulary(VOCAB_SIZE))
    slot = new_slot(objective, objective.build(CPU, in_bf16=False), CPU, settings)
    slot.flat_model.point_at(slot.flat_model.initial_weights())
    mean_gradient(slot.flat_model, slot.objective, first_sequences(4), None)
    return slot.flat_model.gradient


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("microllama", 304_636_928),
        ("llama_1b", 1_100_048_384),
        ("llama_7b", 6_738_415_616),
        ("llama_70b", 68_976_648_192),
        ("gpt2", 124_439_808),
    ],
)
def test_published_shapes(model: str, num_parameters: int) -> None:
    """With their own vocabularies; the counts of TinyLlama, Llama 2 and GPT-2 are those of their cards."""
    settings = compose([f"model={model}"])
    size = 50257 if model == "gpt2" else 32000
    config = model_config(settings.model, Vocabulary(size), 1024)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters


def test_frozen_parameters_are_counted_apart() -> None:
    settings = compose(["model=causal", "model.architecture=pegasus", "+model.overrides.d_model=64"])
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    count = num_parameters(settings.model, config)
    assert count.frozen == config.max_position_embeddings * 64, "sinusoids"
    flat_model = FlatModel(built(settings), CPU, settings.precision)
    assert flat_model.num_parameters == count.total
    assert (
        sum(view.numel() for view in flat_model.parameter_layout.views(flat_model.gradient).values()) == count.trained
    )
    without = state_bytes(settings, 1, 2, replace(count, frozen=0))
    assert state_bytes(settings, 1, 2, count) == 4 * count.frozen + without


def test_a_saved_model_has_its_frozen_parameters(tmp_path: Path) -> None:
    overrides = (f"+model.overrides.{field}=16" for field in ("d_model", "decoder_ffn_dim", "decoder_layers"))
    settings = compose(["model=causal", "model.architecture=pegasus", *overrides])
    before = {name: parameter.detach().clone() for name, parameter in built(settings).named_parameters()}
    flat_model = FlatModel(built(settings), CPU, settings.precision)
    path = save_model(tmp_path, flat_model, 2 * flat_model.initial_weights(), small_objective(settings))
    for name, parameter in AutoModelForCausalLM.from_pretrained(path).named_parameters():
        factor = 1 if name == "model.decoder.embed_positions.weight" else 2
        torch.testing.assert_close(parameter.detach(), factor * before[name], rtol=0, atol=0)


@pytest.mark.parametrize(("architecture", "field"), [("llama", "num_hidden_layers"), ("bart", "decoder_layers")])
def test_a_deep_model_is_counted_without_building_it(architecture: str, field: str) -> None:
    settings = compose(["model=causal", f"model.architecture={architecture}", f"+model.overrides.{field}=3"])
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    counts = []
    for depth in (2, 3, 300):
        setattr(config, field, depth)
        counts.append(num_parameters(settings.model, config).total)
    assert counts[2] == counts[0] + 298 * (counts[1] - counts[0])
    setattr(config, field, 100_000)
    with pytest.raises(SettingsError, match=f"{field}=100000: must be <= 1024 layers"):
        num_parameters(settings.model, config)


@pytest.mark.parametrize(
    ("architecture", "fields", "problem"),
    [
        ("llama", {"num_hidden_layers": 300}, None),
        ("llama", {"num_hidden_layers": 100_000}, "num_hidden_layers=100000: must be <= 1024 layers"),
        ("llama", {"hidden_size": 10_000_000}, None),
        ("mixtral", {}, None),
        ("llama", {"num_key_value_heads": 3}, "no such model can be computed"),
        ("gpt2", {"n_embd": 770}, "no such model can be computed"),
    ],
)
def test_a_dry_run_refuses_what_cannot_be_computed(
    architecture: str, fields: dict[str, int], problem: str | None
) -> None:
    overrides = [f"+model.overrides.{name}={value}" for name, value in fields.items()]
    settings = compose(["model=causal", f"model.architecture={architecture}", *overrides])
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    with pytest.raises(SettingsError, match=problem) if problem else nullcontext():
        try_shape(settings.model, config, is_classifier=False)


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


def test_a_model_is_a_folder_or_one_of_the_hub_with_or_without_a_revision(tmp_path: Path) -> None:
    folder = tmp_path / "run@home"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").touch()
    assert local_model(str(folder)) == (str(folder / "model"), None)
    assert local_model("openai-community/gpt2") == ("openai-community/gpt2", None)
    assert local_model("openai-community/gpt2@refs/pr/9") == ("openai-community/gpt2", "refs/pr/9")
    for nowhere in ("./gpt2@main", str(tmp_path), "a/b/c@main"):
        with pytest.raises(SettingsError, match=f"model.warm_start={nowhere}: no config.json there"):
            local_model(nowhere)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.reset_output=true"], ["model.reset_output=true", "tied"]),
        (["model.attention=nonsense"], ["model.attention=nonsense"]),
        (["model.from_scratch=true"], ["model.from_scratch=True", "model.warm_start"]),
        (["model.compile=true", "algorithm=ddp", "pool.trainers=1"], ["model.compile", "algorithm=ddp"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_reported(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        built(small_settings(*overrides))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_is_tried_out_where_it_will_be_computed() -> None:
    """The meta device stands for one that is not the CPU."""
    settings = small_settings()
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    module = build_model(settings.model, config, 0, device=torch.device("meta"))
    assert module.device.type == "meta"
    assert all(parameter.grad is None for parameter in module.parameters())


def test_attention_for_gpus_is_not_tried_in_a_dry_run() -> None:
    settings = small_settings("model.attention=flash_attention_2")
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    try_shape(settings.model, config, is_classifier=False)
    with pytest.raises(SettingsError, match=r"model\.attention=flash_attention_2"):
        build_model(settings.model, config, 0)

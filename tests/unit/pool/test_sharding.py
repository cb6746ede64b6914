"""Which layers of a model ranks gather one by one, and how they share a tensor."""

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from adloco_dist.pool.sharding import UnsuitableModuleError, blocks_of
from adloco_dist.vectors import Deal


def kinds(module: nn.Module) -> list[str]:
    return [type(one).__name__ for one in blocks_of(module)]


def test_layers_of_transformers_models() -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_key_value_heads=2, **sizes))
    assert kinds(llama) == ["LlamaDecoderLayer"] * 2
    mixtral = AutoConfig.for_model("mixtral", num_key_value_heads=2, num_local_experts=3, **sizes)
    assert kinds(AutoModelForCausalLM.from_config(mixtral)) == ["MixtralDecoderLayer"] * 2, "not their experts"
    t5 = AutoConfig.for_model("t5", num_layers=2, d_model=8, d_ff=8, d_kv=4, num_heads=2, vocab_size=9)
    assert kinds(AutoModelForSeq2SeqLM.from_config(t5)) == ["T5Block"] * 4, "of encoder and decoder"


def test_layers_inside_of_others_and_models_without_any() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    whole = nn.Sequential(nn.Embedding(4, 2), nn.Sequential(layer(), layer(), layer()), nn.Linear(2, 4))
    assert blocks_of(whole) == list(whole[1].children()), "neither the whole nor what layers are made of"
    with pytest.raises(UnsuitableModuleError, match="has no list of layers"):
        blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Embedding(3, 2)))
    with pytest.raises(UnsuitableModuleError, match="has no list of layers"):
        blocks_of(nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])]))


def test_a_tensor_is_dealt_along_the_first_dimension_that_can_be_divided() -> None:
    deal = Deal.of((3, 4, 5), 2)
    assert deal is not None
    assert (deal.dimension, deal.part_shape, deal.num_rows) == (1, (3, 2, 5), 3)
    assert deal.region(1) == (slice(0, 3), slice(2, 4), slice(0, 5))
    assert Deal.of((3, 5), 2) is None
    assert Deal.of((), 2) is None

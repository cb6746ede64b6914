"""Causal models attend without a mask: with one torch takes no flash kernel, or waits for the device to make none."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.architecture import model_config
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.losses import fused_losses, losses
from adloco_dist.objective.models import MASKLESS, build_model
from adloco_dist.pool.gradient import mean_gradient
from adloco_dist.pool.slot import further_slot, new_slot
from helpers.support import SEQUENCE_LENGTH, VOCAB_SIZE, first_sequences

CPU = torch.device("cpu")
LLAMA = ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=4")
GROUPED = (*LLAMA, "num_key_value_heads=2")
SHAPES = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "gpt2": ("n_embd=32", "n_layer=2", "n_head=4"),
    "gpt_neox": LLAMA,
    "opt": ("hidden_size=32", "ffn_dim=64", "num_hidden_layers=2", "num_attention_heads=4", "word_embed_proj_dim=32"),
}

of_the_compiler = pytest.mark.filterwarnings(  # warnings that torch gives itself, which here are errors
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)


def settings_of(architecture: str, fields: tuple[str, ...], *more: str) -> Settings:
    shape = [f"+model.overrides.{field}" for field in fields]
    return compose(["model=causal", f"model.architecture={architecture}", *shape, *more])


def built(settings: Settings) -> PreTrainedModel:
    config = model_config(settings.model, Vocabulary(VOCAB_SIZE), SEQUENCE_LENGTH)
    return build_model(settings.model, config, seed=0)


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", SHAPES)
def test_no_value_is_looked_at_and_no_logit_changes(architecture: str) -> None:
    module = built(settings_of(architecture, SHAPES[architecture])).eval()
    assert module.config._attn_implementation == MASKLESS
    with Operations() as operations:
        found = losses(module, first_sequences(3))
    assert operations.counts["aten._local_scalar_dense.default"] == 0, "a GPU would be waited for"
    theirs = built(settings_of(architecture, SHAPES[architecture], "model.attention=sdpa")).eval()
    assert theirs.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found, losses(theirs, first_sequences(3)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("field", ["sliding_window=8", "sliding_window=4096"])
def test_a_window_is_kept(field: str) -> None:
    assert built(settings_of("mistral", (*GROUPED, field))).config._attn_implementation == "sdpa"


def test_an_architecture_with_attention_of_its_own_is_left_as_it_is() -> None:
    module = built(settings_of("bloom", ("hidden_size=32", "n_layer=2", "n_head=4")))
    assert module.config._attn_implementation == "eager"


def test_what_is_saved_does_not_name_our_attention() -> None:
    assert MASKLESS not in built(settings_of("llama", GROUPED)).config.to_json_string()


def test_the_compiled_graph_has_no_mask_and_few_graphs_serve_all_sizes() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(losses, backend=keep, fullgraph=True)  # which refuses a break in the graph
    module = built(settings_of("llama", GROUPED))
    for size in (4, 8, 6, 1, 3):
        batch = first_sequences(size)
        torch.testing.assert_close(compiled(module, batch), losses(module, batch), rtol=0, atol=1e-6)
    assert len(graphs) <= 3, "another graph for another number of sequences"
    for graph in graphs:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        assert len(calls) == 2, "one for each layer"
        for call in calls:
            assert call.kwargs["attn_mask"] is None
            assert call.kwargs["is_causal"] is True
            assert call.kwargs["enable_gqa"] is True
        assert any("cross_entropy" in str(node.target) for node in graph.graph.nodes), "the loss is in the graph"


@of_the_compiler
def test_lanes_share_what_was_compiled() -> None:
    torch._dynamo.reset()
    settings = settings_of("llama", GROUPED, "model.compile=true")
    objective = LanguageObjective.fitted(settings, Vocabulary(VOCAB_SIZE))
    first = new_slot(objective, objective.build(CPU, in_bf16=False), CPU, settings)
    first.flat_model.initial_weights()
    slots = [first, further_slot(first, settings)]
    gradients = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for slot in slots:
            mean_gradient(slot.flat_model, slot.objective, first_sequences(4), None)
            gradients.append(slot.flat_model.gradient)
    assert torch.equal(*gradients)


@of_the_compiler
def test_a_fused_loss_is_the_same_loss() -> None:
    """Packed and with padding; a CPU's compiler stands for a GPU's here."""
    fused, module = fused_losses(CPU), built(settings_of("gpt2", SHAPES["gpt2"])).eval()
    tokens = first_sequences(3).tokens
    lengths = torch.tensor([SEQUENCE_LENGTH, 5, 9])
    for batch in (TokenBatch.packed(tokens), TokenBatch(tokens, (SEQUENCE_LENGTH - 1, 4, 8), lengths)):
        torch.testing.assert_close(fused(module, batch), losses(module, batch), rtol=0, atol=1e-6)

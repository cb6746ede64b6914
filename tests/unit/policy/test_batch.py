"""What a model is given: where labels are shifted, and that padding has no influence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from adloco_dist.config import Corpus, DataSettings, Packing
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import DocumentTable, TokenBatch, padded
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.losses import losses, losses_of, predict
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import mean_gradient
from adloco_dist.round.evaluate import evaluate
from helpers.corpora import numbered_document, write_shards, write_tokenizer
from helpers.gradients import per_sequence_gradients
from helpers.support import CPU, small_module, small_objective, small_settings


class Successor(nn.Module):
    """Knows that id t is followed by t + 1, of ten."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> CausalLMOutput:
        logits = torch.nn.functional.one_hot((input_ids + 1) % 10, 10) * 1e4
        return CausalLMOutput(logits=logits)  # pyright: ignore[reportArgumentType]


OBJECTIVE = small_objective(small_settings())


def documents(*lengths: int) -> TokenBatch:
    rng = np.random.default_rng(3)
    return padded([rng.integers(0, 20, length).astype(np.uint16) for length in lengths], pad=7)


def flat(*overrides: str) -> FlatModel:
    settings = small_settings(*overrides)
    model = FlatModel(small_module(settings), CPU, settings.precision)
    model.initial_weights()
    return model


def test_labels_are_shifted_once() -> None:
    """A model that gives its input's next token reaches zero loss; two steps on, it would know nothing."""
    tokens = (torch.arange(24).view(3, 8) * 1) % 10
    assert losses(Successor(), TokenBatch.packed(tokens)).abs().max() == 0
    assert losses(Successor(), TokenBatch.packed(torch.arange(0, 16, 2).view(1, 8) % 10)).min() > 1e3


def test_what_a_guess_costs() -> None:
    batch = documents(5, 9, 2)
    logits = torch.zeros(3, 8, 20)
    assert float(losses_of(logits, batch).sum()) / batch.total_targets == pytest.approx(np.log(20))
    assert batch.num_targets == (4, 8, 1)


def test_padding_has_no_influence() -> None:
    """Neither what it is, nor how much of it: losses and gradients are those of the documents by themselves."""
    model, batch = flat(), documents(5, 9, 2)
    other = TokenBatch(batch.tokens.clone(), batch.num_targets, batch.lengths)
    for row, length in zip(other.tokens, (5, 9, 2), strict=True):
        row[length:] = 3
    wide = TokenBatch(torch.cat([batch.tokens, batch.tokens[:, :3]], 1), batch.num_targets, batch.lengths)
    mean_gradient(model, OBJECTIVE, batch, None)
    expected = model.gradient.clone()
    for changed in (other, wide):
        torch.testing.assert_close(
            losses(model.module, changed)[:, :8], losses(model.module, batch), rtol=0, atol=1e-12
        )
        mean_gradient(model, OBJECTIVE, changed, None)
        torch.testing.assert_close(model.gradient, expected, rtol=0, atol=1e-12)
    alone = [losses(model.module, batch.part(place, place + 1)) for place in range(3)]
    assert [row.shape[1] for row in alone] == [4, 8, 1], "columns that are padding alone are cut off"
    together = float(losses(model.module, batch).detach().sum())
    assert sum(float(row.detach().sum()) for row in alone) == pytest.approx(together, abs=1e-10)


@pytest.mark.parametrize("capacity", [1, 2, 3, None])
def test_every_target_has_the_same_weight_whatever_the_passes(capacity: int | None) -> None:
    model, batch = flat(), documents(5, 9, 2, 12, 3)
    model.module.zero_grad()
    sum(losses(model.module, part).sum() for part in batch.split(1)).div(batch.total_targets).backward()  # pyright: ignore[reportAttributeAccessIssue]
    expected = model.gradient.clone()
    loss = mean_gradient(model, OBJECTIVE, batch, capacity).mean
    torch.testing.assert_close(model.gradient, expected, rtol=0, atol=1e-12)
    assert float(loss) == pytest.approx(float(losses(model.module, batch).detach().sum()) / batch.total_targets)


def test_statistics_of_padded_batches_weigh_targets() -> None:
    """s_j is a chunk's targets over the mean per sequence; then gbar is the gradient that is taken."""
    model, batch = flat(), documents(5, 9, 2, 12)
    rows, sizes = per_sequence_gradients(model, OBJECTIVE, batch)
    mean_gradient(model, OBJECTIVE, batch, None)
    sizes = sizes[:, 0]
    assert float(sizes.sum()) == pytest.approx(4)
    torch.testing.assert_close((sizes[:, None] * rows).sum(0) / sizes.sum(), model.gradient, rtol=0, atol=1e-12)
    measured = statistics_from_gram(rows @ rows.T, sizes)
    by_hand = float((sizes * (rows**2).sum(1)).sum() - sizes.sum() * (model.gradient**2).sum()) / 3
    assert measured.trace == pytest.approx(by_hand)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_a_classifier_of_any_architecture_reads_no_padding(architecture: str) -> None:
    settings = compose(
        [
            "precision=fp64",
            "model=causal",
            f"model.architecture={architecture}",
            *sizes_of(architecture),
            "data=python_packages",
        ]
    )
    objective = LanguageObjective.fitted(settings, Vocabulary(20, 19), labels=("a", "b", "c"))
    model = FlatModel(objective.build(CPU, in_bf16=False), CPU, settings.precision)
    weights = model.initial_weights()
    short, labels = documents(5, 9, 4), np.array([0, 2, 1])
    assert short.lengths is not None
    rows = [row[:length].numpy().astype(np.uint16) for row, length in zip(short.tokens, (5, 9, 4), strict=True)]
    store = DocumentTable(rows, 19, labels)
    batch = store.batch(np.arange(3))
    alone = torch.cat([predict(model.module, store.batch(np.array([place]))) for place in range(3)])
    torch.testing.assert_close(predict(model.module.eval(), batch), alone, rtol=0, atol=1e-6)
    evaluation = evaluate(model, objective, weights, store, range(3), 2)
    assert evaluation.targets == 3
    assert evaluation.correct == int((alone.argmax(1) == torch.tensor(labels)).sum())


def sizes_of(architecture: str) -> list[str]:
    fields = {
        "bert": ("hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=32"),
        "llama": ("hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=32"),
        "gpt2": ("n_embd=16", "n_layer=2", "n_head=2"),
    }[architecture]
    dropout = {
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    }
    return [
        f"+model.overrides.{field}" for field in (*fields, *(f"{name}=0.0" for name in dropout.get(architecture, ())))
    ]


def corpus(folder: Path, **more: Any) -> DataSettings:
    if not folder.exists():
        write_shards(folder, (30, 20))
    return DataSettings(corpus=Corpus.json, train=[str(folder / "*.gz")], sequence_length=16, **more)


def test_one_document_per_sequence(tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", [numbered_document(number) for number in range(50)]))
    splits = load_corpus(corpus(tmp_path / "c4", tokenizer=tokenizer, packing=Packing.document))
    assert isinstance(splits.table, DocumentTable)
    assert splits.table.num_sequences + splits.validation.num_sequences == 50
    batch = splits.table.batch(np.arange(splits.table.num_sequences))
    assert batch.lengths is not None and batch.lengths.max() == 17 and batch.lengths.min() < 17
    assert splits.vocabulary.tokenizer is not None
    end = splits.vocabulary.tokenizer.eos_token_id
    for row, length in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True):
        text = str(splits.vocabulary.tokenizer.decode([token for token in row[:length] if token != end]))
        number = int(text[1 : text.index(">")])
        assert numbered_document(number).startswith(text)
        assert row[length - 1] == end or length == 17, "closed, unless it was cut off"

"""A saved model is what transformers' own tools expect: it ends, fills up batches, and its tokenizer reloads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from adloco_dist.checkpoint.model import save_model
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary, byte_tokenizer, load_encoder, train_tokenizer
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.pool.flat_model import FlatModel
from helpers.found_tokenizers import TEXT, of_bytes, templated, written

pytestmark = pytest.mark.stranger
CPU = torch.device("cpu")
ENDED = {"bos_token": "<s>", "eos_token": "</s>"}


def found(make: Callable[[], Any], **special: Any) -> Callable[[Path], Vocabulary]:
    def load(folder: Path) -> Vocabulary:
        return Vocabulary.of(AutoTokenizer.from_pretrained(written(folder / "found", make(), **special)))

    return load


def of_bytes_alone(folder: Path) -> Vocabulary:
    return load_encoder(compose([]).data).vocabulary


def trained(folder: Path) -> Vocabulary:
    return Vocabulary.of(train_tokenizer([TEXT] * 20, 300))


VOCABULARIES: dict[str, Callable[[Path], Vocabulary]] = {
    "bytes": of_bytes_alone,
    "trained here": trained,
    "no padding": found(of_bytes, **ENDED),
    "padding of its own": found(of_bytes, **ENDED, pad_token="<pad>"),
    "a template": found(lambda: templated(of_bytes(), "<s> $A </s>"), **ENDED),
    "a template's end alone": found(lambda: templated(of_bytes(), "<s> $A </s>"), cls_token="<s>", sep_token="</s>"),
}


def saved(folder: Path, vocabulary: Vocabulary, *overrides: str, labels: tuple[str, ...] = ()) -> Path:
    settings = compose(["model=nano", "data.sequence_length=32", *overrides])
    objective = LanguageObjective.fitted(settings, vocabulary, labels)
    flat_model = FlatModel(objective.build(CPU, in_bf16=False), CPU, settings.precision)
    return save_model(folder / "run", flat_model, flat_model.initial_weights(), objective)


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("architecture", ["nano", "gpt2"])
def test_config_and_generation_config_name_the_tokenizers_tokens(kind: str, architecture: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[kind](tmp_path)
    small = ["model=gpt2", "+model.overrides.n_layer=1", "+model.overrides.n_embd=12"] if architecture == "gpt2" else []
    path = saved(tmp_path, vocabulary, *small)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == vocabulary.end is not None
    assert model.config.bos_token_id == model.generation_config.bos_token_id == tokenizer.bos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id is not None
    assert model.config.pad_token_id in {None, tokenizer.pad_token_id} - {vocabulary.end}, "its row would not train"
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 1024
    assert model.dtype == torch.float32


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_the_tokenizer_reloads_with_the_same_ids(kind: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[kind](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(saved(tmp_path, vocabulary))
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    for text in ("naïve 日本 🙂\n\t def f(x):", TEXT, "", " a  b ", "<|im_end|> </s>"):
        assert vocabulary.tokenizer is not None
        expected = vocabulary.tokenizer(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"] == expected
    plain = tokenizer("naïve 日本 🙂\n\t def f(x):", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(plain) == "naïve 日本 🙂\n\t def f(x):"


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_batches_are_filled_up_and_generation_ends(kind: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[kind](tmp_path)
    path = saved(tmp_path, vocabulary)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    batch = tokenizer(["a", "abc def"], padding=True, return_tensors="pt")
    logits = model(**batch).logits
    alone = model(**tokenizer("a", return_tensors="pt")).logits
    assert torch.allclose(logits[0, : alone.shape[1]], alone[0], atol=1e-5)

    assert vocabulary.end is not None
    with torch.no_grad():  # a model that always ends
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        model.lm_head.bias[vocabulary.end] = 1
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answers, others) = writer(["the cat", "the"], max_new_tokens=50, batch_size=2, do_sample=False)
    assert (answers[0]["generated_text"], others[0]["generated_text"]) == ("the cat", "the")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("model", ["nano", "gpt2", "bert_nano"])
def test_tied_embeddings_are_stored_once(model: str, is_tied: bool, tmp_path: Path) -> None:
    small = ["+model.overrides.n_layer=1", "+model.overrides.n_embd=12"] if model == "gpt2" else []
    tie = f"{'' if model == 'nano' else '+'}model.overrides.tie_word_embeddings={is_tied}"
    path = saved(tmp_path, of_bytes_alone(tmp_path), f"model={model}", *small, tie, "data.corpus=python_stdlib")
    with safe_open(path / "model.safetensors", framework="pt") as file:
        embeddings = [name for name in file.keys() if tuple(file.get_slice(name).get_shape())[:1] == (257,)]  # noqa: SIM118
        matrices = [name for name in embeddings if len(file.get_slice(name).get_shape()) == 2]
    assert len(matrices) == (1 if is_tied else 2)
    found: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    loaded, detail = found
    assert not any(detail["missing_keys"]) and not any(detail["unexpected_keys"])
    inputs, outputs = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    assert (inputs.weight is outputs.weight) == is_tied


def test_a_warm_start_keeps_what_its_model_says_of_its_own_tokens(tmp_path: Path) -> None:
    """A chat model ends at several tokens, one of them its tokenizer's."""
    vocabulary = VOCABULARIES["no padding"](tmp_path)
    path = saved(tmp_path, vocabulary)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**content, "eos_token_id": [1, 2]}))
    again = saved(tmp_path / "again", vocabulary, "model=pretrained", f"model.warm_start={path}")
    model = AutoModelForCausalLM.from_pretrained(again)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [1, 2]


@pytest.mark.parametrize("kind", ["bytes", "padding of its own", "a template"])
@pytest.mark.parametrize("model", ["nano", "bert_nano"])
def test_a_classifier_answers_with_its_labels(kind: str, model: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[kind](tmp_path)
    corpus = ["data=json", "data.train=[x]", "data.label_column=label"]
    path = saved(tmp_path, vocabulary, f"model={model}", *corpus, labels=("cat", "dog"))
    loaded, tokenizer = (auto.from_pretrained(path) for auto in (AutoModelForSequenceClassification, AutoTokenizer))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    reader = pipeline("text-classification", model=loaded, tokenizer=tokenizer)
    together, alone = reader(["the cat", TEXT], batch_size=2), reader("the cat")
    assert together[0]["label"] == alone[0]["label"] in {"cat", "dog"}
    assert together[0]["score"] == pytest.approx(alone[0]["score"], abs=1e-5)


def test_the_byte_tokenizer_reads_bytes() -> None:
    text = "naïve 日本 🙂"
    assert byte_tokenizer()(text)["input_ids"] == list(text.encode())

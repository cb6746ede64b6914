"""The code about frameworks in docs/guide/own-loop.md."""

import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from helpers.commands import ROOT, run


def blocks(section: str) -> list[str]:
    """The Python blocks of a section of the guide."""
    text = (ROOT / "docs" / "guide" / "own-loop.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", body, re.DOTALL)


def rounds_of(section: str, num_ranks: int, folder: Path) -> list[str]:
    """What a section's loop says of its rounds, on ranks of torchrun."""
    path = folder / "my_loop.py"
    (code,) = blocks(section)
    path.write_text(code, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    done = run([sys.executable, *torchrun, str(path)], folder)
    assert done.code == 0, done.output
    # Ranks print on one terminal: the line of one may begin before that of another has ended.
    return re.findall(r"round \d+: .*?(?=round \d+: |$)", done.output, re.MULTILINE)


@pytest.mark.needs("lightning")
def test_the_loop_of_lightning_averages(tmp_path: Path) -> None:
    assert sorted(rounds_of("In Lightning", 2, tmp_path)) == [f"round 4: rank {rank} of 2" for rank in (0, 1)]


@pytest.mark.needs("trl")
def test_a_trainer_of_trl_averages(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcdefghij"])}
    model = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "base")
    config = LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    assert sorted(rounds_of("In TRL's trainers", 2, tmp_path)) == [f"round 4: rank {rank} of 2" for rank in (0, 1)]


@pytest.mark.needs("accelerate")
def test_the_loop_of_accelerate_runs_on_two_ranks(tmp_path: Path) -> None:
    rounds = [line.partition(":")[0] for line in rounds_of("In a loop of accelerate", 2, tmp_path)]
    assert rounds == [f"round {number}" for number in range(1, 11)]


def test_the_loop_of_a_sharded_model_learns_on_two_workers_of_two_ranks(tmp_path: Path) -> None:
    losses = [float(line.rpartition(" ")[2]) for line in rounds_of("A model that spans several ranks", 4, tmp_path)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("section", "example"),
    [("In transformers' `Trainer`", "trainer.py"), ("Adapters of peft", "lora_slow_link.py")],
)
def test_excerpts_are_lines_of_the_examples_in_their_order(section: str, example: str) -> None:
    lines = iter((ROOT / "examples" / example).read_text(encoding="utf-8").splitlines())
    (code,) = blocks(section)
    for line in code.splitlines():
        assert line in lines, line  # which resumes from the line before

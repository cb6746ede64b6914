"""Text from a finished run's model: `launch/generate.py RUN "text"`."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from adloco_dist.command import as_tool
from adloco_dist.config import SettingsError, require
from adloco_dist.run.directory import MODEL_DIRECTORY
from adloco_dist.run.reading import read_run, settings_of
from adloco_dist.terminal import reported_wait, show
from adloco_dist.tools.finished import load_model, readable


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/generate.py."""
    parser = argparse.ArgumentParser(description="Continue a text with a run's model.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("text", help="how it begins")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with as_tool():
        with reported_wait(lambda: f"writing {options.tokens} tokens: still at it"):
            text = continue_text(options.run, options.text, options.tokens, options.temperature, options.seed)
        show(text)


def continue_text(directory: Path, text: str, num_tokens: int, temperature: float, seed: int) -> str:
    """`text` and what the model writes after it, the same for the same seed; raises a SettingsError where there is no
    such run, it is damaged, or its model has no tokenizer (it was trained on token files)."""
    require(num_tokens >= 1, "--tokens", num_tokens, "must be >= 1")
    is_usable = temperature == 0 or 1e-3 <= temperature <= 1e3
    require(is_usable, "--temperature", temperature, "must be 0, or from 0.001 to 1000")
    require(0 <= seed < 2**64, "--seed", seed, "must be >= 0 and below 2**64")
    require(text != "", "text", text, "must not be empty")
    is_utf8 = not any("\ud800" <= character <= "\udfff" for character in text)  # as Python takes other bytes
    require(is_utf8, "text", text, "must be UTF-8")
    settings = settings_of(directory, read_run(directory))
    if settings.data.is_labelled:
        raise SettingsError(f"RUN={directory}: its model predicts labels, not text; name a run of a causal model")
    model: Any = load_model(directory, settings)  # Any: transformers' types refuse to bind generate() to a model
    if not (directory / MODEL_DIRECTORY / "tokenizer_config.json").is_file():
        raise SettingsError(f"RUN={directory}: its model has no tokenizer; copy the one of its token files to model/")
    with readable(directory, f"the tokenizer in its {MODEL_DIRECTORY}/"):
        tokenizer = AutoTokenizer.from_pretrained(
            directory / MODEL_DIRECTORY, local_files_only=True, trust_remote_code=False
        )
        prompt = tokenizer(text, return_tensors="pt")
        max_id = int(prompt["input_ids"].max())
    rule = f"its tokenizer has the id {max_id}, its model {model.config.vocab_size} ids; restore both"
    require(max_id < model.config.vocab_size, "RUN", directory, rule)
    torch.manual_seed(seed)
    chosen = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with readable(directory, f"what its {MODEL_DIRECTORY}/ says about generation"):
        output = model.generate(**prompt, max_new_tokens=num_tokens, pad_token_id=tokenizer.eos_token_id, **chosen)
        return tokenizer.decode(output[0], skip_special_tokens=True)

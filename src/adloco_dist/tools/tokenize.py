"""A corpus made into token files once, in parallel: `launch/tokenize_corpus.py OUT key=value ...`.

Every unit of work (a file, or a part of one) becomes files of its own, each written whole or not at all, so that an
interrupted command resumes where it stopped and the bytes do not depend on how many processes made them.
"""

import argparse
import copy
import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from adloco_dist.cluster.signals import begin_in_pool, signals_held
from adloco_dist.command import as_tool
from adloco_dist.config import Corpus, DataSettings, SettingsError, refused, require
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import files_of
from adloco_dist.data.documents import RowFiles
from adloco_dist.data.encoding import Tokens, load_encoder, train_tokenizer
from adloco_dist.data.hub import prefer_cache_without_hub
from adloco_dist.data.text_files import TextFiles
from adloco_dist.data.token_files import MANIFEST_FILE, Manifest, TokenFile, max_id
from adloco_dist.messages import decode, decode_json, encode
from adloco_dist.run.manifest import write_content
from adloco_dist.terminal import new_console, reported_wait, show
from adloco_dist.text import one_line

DOCUMENTS_PER_CALL = 256
FILES_PER_UNIT = 256
"""Text files of a unit, each of which is one document."""
PLAN_FILE = "plan.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Unit:
    """A unit of work, which one process turns into token files."""

    name: str
    files: tuple[str, ...]
    index: int = 0
    """Which one of every `stride` rows the unit takes."""
    stride: int = 1


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/tokenize_corpus.py."""
    parser = argparse.ArgumentParser(
        description="Tokenize a corpus into token files, from which training starts at once: data=tokens "
        "'data.train=[OUT/train]' 'data.validation=[OUT/validation]'. The same command resumes after an interruption.",
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of data, as for launch/train.py")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    parser.add_argument("--parts", type=int, default=1, help="units that every file of rows is cut into (%(default)s)")
    parser.add_argument("--files", type=int, help="take so many files of the training split only (default: all)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="of a file at most (%(default)s)")
    parser.add_argument("--train-tokenizer", type=int, metavar="SIZE", help="train a BPE tokenizer of so many tokens")
    parser.add_argument("--tokenizer-documents", type=int, default=100_000, help="it is trained on (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    with as_tool():
        show(tokenize_corpus(options))


def tokenize_corpus(options: argparse.Namespace) -> str:
    """Write train/, validation/ (where the settings name one) and tokenizer/ under `options.out`; a line for the user;
    raises a SettingsError for a mistake in the settings or options, or a damaged file."""
    for name, minimum in {"processes": 1, "parts": 1, "shard_tokens": 2, "tokenizer_documents": 1, "files": 1}.items():
        value = getattr(options, name)
        require(value is None or value >= minimum, f"--{name.replace('_', '-')}", value, f"must be >= {minimum}")
    data = compose(options.overrides).data
    is_text = data.corpus is not Corpus.tokens
    require(is_text, "data.corpus", data.corpus, "is tokenised already; name a corpus of text")
    require(not data.is_labelled, "data.label_column", data.label_column, "token files hold no labels; leave it out")
    prefer_cache_without_hub(data.hub, data.tokenizer)
    with reported_wait(lambda: "looking at the corpus: still at it"):
        splits: dict[str, Source] = dict(zip(("train", "validation"), files_of(data), strict=True))
    splits["train"] = replace(splits["train"], files=splits["train"].files[: options.files])
    for folder in (options.out / split for split in splits):
        if folder.exists() and not (folder / PLAN_FILE).exists() and any(folder.iterdir()):
            raise SettingsError(f"OUT={folder}: holds other files; name a new folder")
    tokenizer = _tokenizer(options, data, splits["train"])
    data, lines = replace(data, tokenizer=tokenizer), []
    for split, source in splits.items():
        if units := _units(source, options.parts):
            lines.append(_tokenize_split(options, data, split, source, units))
    names = [f"'data.{split}=[{options.out / split}]'" for split in splits if (options.out / split).exists()]
    return "\n".join([*lines, f"train from it: data=tokens {' '.join(names)}"])


Source = RowFiles | TextFiles


def _units(source: Source, parts: int) -> list[Unit]:
    if isinstance(source, RowFiles):
        if source.maximum is not None:  # counted over all files
            return [Unit("00000", source.files)] if source.files else []
        pairs = [(file, part) for file in source.files for part in range(parts)]
        return [Unit(f"{number:05}", (file,), part, parts) for number, (file, part) in enumerate(pairs)]
    groups = [source.files[start : start + FILES_PER_UNIT] for start in range(0, len(source.files), FILES_PER_UNIT)]
    return [Unit(f"{number:05}", group) for number, group in enumerate(groups)]


def _tokenizer(options: argparse.Namespace, data: DataSettings, source: Source) -> str | None:
    """What `data.tokenizer` is to be: one that is trained now, or was when the command first ran."""
    size, folder = options.train_tokenizer, options.out / TOKENIZER
    if size is None:
        return data.tokenizer
    require(data.tokenizer is None, "data.tokenizer", data.tokenizer, "and --train-tokenizer: give one of them")
    require(size >= 300, "--train-tokenizer", size, "must be >= 300: 256 bytes, and what is learnt")
    if not (folder / "tokenizer.json").exists():
        # A copy: what it leaves out is reported when the files are written.
        texts = (document.text for document in copy.deepcopy(source).documents() if document.text)
        trained = train_tokenizer(islice(texts, options.tokenizer_documents), size)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / ".draft"
        trained.save_pretrained(draft)
        for path in sorted(draft.iterdir(), key=lambda path: path.name == "tokenizer.json"):  # it says: whole
            path.rename(folder / path.name)
        draft.rmdir()
    return str(folder)


def _tokenize_split(
    options: argparse.Namespace, data: DataSettings, split: str, source: Source, units: Sequence[Unit]
) -> str:
    """Tokenize all units of a split but those that are done already, then write the manifest."""
    folder, encoder = options.out / split, load_encoder(data)
    made_of = _made_of(data, units, encoder.digest, options.shard_tokens)
    _begin(folder, made_of)
    done = {unit.name: _finished(folder, unit) for unit in units}
    left = [unit for unit in units if done[unit.name] is None]
    num_processes, context = min(options.processes, max(1, len(left))), multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(num_processes, context, begin_in_pool, (os.getpid(),))
    bar, tokens_column = (BarColumn(), MofNCompleteColumn()), "{task.fields[tokens]} tokens"
    columns = ("{task.description}", *bar, tokens_column, TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=new_console(stderr=True)) as progress, processes as pool:
        task = progress.add_task(split, total=len(units), completed=len(units) - len(left), tokens="0")
        with signals_held([signal.SIGINT]):  # processes that still import would show where they were
            jobs = {pool.submit(tokenize_unit, folder, unit, source, data, options.shard_tokens): unit for unit in left}
        tokens, printed = 0, set()
        try:
            for job in as_completed(jobs):
                files, skipped, counts = job.result()
                encoder.counts.update(counts)
                done[jobs[job].name] = files
                tokens += sum(file.num_tokens for file in files)
                progress.update(task, advance=1, tokens=f"{tokens:,}")
                notes = [line for line in skipped if line not in printed]  # several units may read one file
                printed.update(notes)
                for line in [*notes, *([] if progress.console.is_terminal else [f"{split} {jobs[job].name} done"])]:
                    progress.console.print(one_line(line), soft_wrap=True)
        except BaseException:  # what is not begun yet is not begun
            pool.shutdown(cancel_futures=True)
            raise
    files = [file for unit in units for file in done[unit.name] or ()]
    if not files:
        raise SettingsError(f"data.{split}: holds no text; name files that are not empty")
    vocabulary = encoder.vocabulary
    if vocabulary.tokenizer is not None:
        vocabulary.tokenizer.save_pretrained(options.out / TOKENIZER)
    manifest = encode(Manifest(files, f"../{TOKENIZER}", vocabulary.size, made_of))
    write_content(folder / MANIFEST_FILE, (json.dumps(manifest, indent=2) + "\n").encode())
    total = sum(file.num_tokens for file in files)
    line = f"{folder}: {total:,} tokens in {len(files)} file(s), vocabulary of {vocabulary.size:,}"
    return "\n".join([line, *(f"note: {note}" for note in encoder.take_notes())])


def tokenize_unit(
    folder: Path, unit: Unit, source: Source, data: DataSettings, shard_tokens: int
) -> tuple[list[TokenFile], list[str], Counter[int]]:
    """Write a unit's token files, and last a note of them, which says that the unit is done.

    Returns:
        The files, what was skipped of damaged ones, and what the encoder counted in texts.

    Raises:
        SettingsError: a file cannot be read to its end.
    """
    encoder, files = load_encoder(data), []
    pending: list[Tokens] = []
    documents = islice(replace(source, files=unit.files).documents(), unit.index, None, unit.stride)
    texts = (document.text for document in documents if document.text)
    while group := list(islice(texts, DOCUMENTS_PER_CALL)):
        pending += encoder.encode(group)
        if sum(map(len, pending)) >= shard_tokens:
            whole = np.concatenate(pending)
            for start in range(0, len(whole) - shard_tokens + 1, shard_tokens):
                files.append(_write(folder, unit, len(files), whole[start : start + shard_tokens]))
            pending = [whole[len(whole) // shard_tokens * shard_tokens :]]
    if sum(map(len, pending)):
        files.append(_write(folder, unit, len(files), np.concatenate(pending)))
    write_content(folder / f".{unit.name}.json", json.dumps(encode(files)).encode())
    return files, source.take_notes(), encoder.counts


def _write(folder: Path, unit: Unit, number: int, tokens: Tokens) -> TokenFile:
    path = folder / f"{unit.name}_{number:03}.npy"
    draft = path.with_name(f".{path.name}")
    with draft.open("wb") as file:
        np.save(file, tokens, allow_pickle=False)
    draft.rename(path)
    return TokenFile(path.name, len(tokens), max_id(tokens), sha256(tokens.tobytes()).hexdigest())


def _finished(folder: Path, unit: Unit) -> list[TokenFile] | None:
    """The files of a unit that an earlier command has finished."""
    try:
        files = decode(list[TokenFile], decode_json((folder / f".{unit.name}.json").read_bytes()))
    except (OSError, ValueError):
        return None
    return files if all((folder / file.name).exists() for file in files) else None


def _begin(folder: Path, made_of: dict[str, Any]) -> None:
    """Take a folder that is new, or in which the same work was begun."""
    plan = folder / PLAN_FILE
    if plan.exists():
        if json.loads(plan.read_text(encoding="utf-8")) != made_of:
            raise SettingsError(f"OUT={folder}: holds tokens of other settings or files; name another folder")
        return
    with refused(f"OUT={folder}: cannot be written", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        plan.write_text(json.dumps(made_of, indent=2) + "\n", encoding="utf-8")


def _made_of(data: DataSettings, units: Sequence[Unit], encoder: str, shard_tokens: int) -> dict[str, Any]:
    """Everything that the token files depend on; of a file its name and size, wherever it lies."""
    paths = {file: Path(file) for unit in units for file in unit.files}
    sizes = {file: f"{path.name} {path.stat().st_size}" if path.is_file() else file for file, path in paths.items()}
    return {
        "corpus": data.corpus.name,
        "text_column": data.text_column,
        "damaged": data.damaged.name,
        "validation_documents": data.validation_documents,
        "encoder": encoder,
        "shard_tokens": shard_tokens,
        "units": [[*(sizes[file] for file in unit.files), unit.index, unit.stride] for unit in units],
    }

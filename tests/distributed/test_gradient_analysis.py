"""The analysis of a model's gradients, against plain autograd, on one rank and on two."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.checkpoint.model import save_model
from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose, to_plain
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.tokens import DocumentTable, TextTable, TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.losses import losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import mean_gradient
from adloco_dist.tools.gradients import (
    AnalysisOptions,
    Subject,
    analyze_run,
    full_gradient,
    summary,
)
from helpers.commands import ROOT, run
from helpers.processes import run_ranks
from helpers.support import (
    CPU,
    FOUR_TRAINERS,
    SEQUENCE_LENGTH,
    SMALL,
    VOCAB_SIZE,
    Matrix,
    small_module,
    small_objective,
    small_settings,
    small_store,
)

COUNT = 24
ETA = 0.8


def analyze(runtime: Runtime, table: TextTable, sizes: list[int], micro_batch_size: int) -> dict[str, Any]:
    """Of a small model on the first sequences of the store: G, the gradient of all of them at once, and summaries."""
    settings = small_settings(*FOUR_TRAINERS)
    flat_model = FlatModel(small_module(settings), CPU, settings.precision)
    flat_model.initial_weights()
    objective = small_objective(settings)
    subject = Subject(settings, flat_model, objective, "train", table, np.arange(COUNT), micro_batch_size)
    group = Groups(runtime.backend, 60.0).of(tuple(range(runtime.world_size)))
    full = full_gradient(subject, runtime.control, group)
    summaries = [summary(subject, full, size, runtime.control) for size in sizes]
    loss = mean_gradient(flat_model, objective, table.batch(subject.ids), None).mean
    return {
        "full": full.vector.numpy().copy(),
        "whole": flat_model.gradient.numpy().copy(),
        "losses": (full.loss, float(loss)),
        "summaries": summaries,
    }


def documents() -> DocumentTable:
    """Of different lengths: padding, and sequences that do not weigh the same."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, SEQUENCE_LENGTH + 1, size=COUNT)
    return DocumentTable([rng.integers(1, VOCAB_SIZE, size=length).astype(np.uint16) for length in lengths], pad=0)


def gradients_of_each(table: TextTable) -> tuple[Matrix, Matrix]:
    """Of the first sequences by a backward pass each: (COUNT, parameters), and their targets, (COUNT,)."""
    module = small_module(small_settings()).double()
    rows, targets = [], []
    for sequence in table.batch(np.arange(COUNT)).split(1):
        module.zero_grad()
        (losses(module, sequence).sum() / sequence.total_targets).backward()
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).numpy())
        targets.append(float(sequence.total_targets))
    return np.stack(rows), np.array(targets)


def numbers(value: Any) -> Iterator[float]:
    """All of them in nested lists and objects, in their order."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from numbers(item)
        elif isinstance(item, int | float):
            yield item


@pytest.mark.parametrize("table", [small_store(), documents()], ids=["packed", "padded"])
def test_the_full_gradient_is_that_of_one_batch_and_the_noise_that_of_the_sequences(table: TextTable) -> None:
    (found,) = run_ranks(analyze, [0], table, [1, 5, COUNT], 3)
    np.testing.assert_allclose(found["full"], found["whole"], atol=1e-12 + 1e-9 * np.abs(found["whole"]).max())
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-9)
    gradients, targets = gradients_of_each(table)
    full = targets @ gradients / targets.sum()
    squared_deviations = np.sum((gradients - full) ** 2, axis=1)
    trace, squared_norm = np.mean((targets / targets.mean()) ** 2 * squared_deviations), full @ full
    single, some, all_of_them = found["summaries"]
    assert (single["num_batches"], some["num_batches"], all_of_them["num_batches"]) == (COUNT, COUNT // 5, 1)
    assert single["trace"] == pytest.approx(trace, rel=1e-9)
    assert single["noise_scale"] == pytest.approx(trace / squared_norm, rel=1e-9)
    assert single["request"] == pytest.approx(trace / (ETA**2 * squared_norm), rel=1e-9)
    norms = np.linalg.norm(gradients, axis=1)
    exact = {
        "norm": norms,
        "relative_deviation": np.sqrt(squared_deviations / squared_norm),
        "cosine": gradients @ full / (norms * np.sqrt(squared_norm)),
    }
    for name, values in exact.items():
        np.testing.assert_allclose(np.sort(single["values"][name]), np.sort(values), rtol=1e-9, atol=1e-12)
        assert single[name]["median"] == pytest.approx(np.median(values), rel=1e-9)
    assert all_of_them["relative_deviation"]["mean"] < 1e-9
    assert all_of_them["cosine"]["mean"] == pytest.approx(1.0, rel=1e-9)
    assert all_of_them["norm"]["mean"] == pytest.approx(np.sqrt(squared_norm), rel=1e-9)
    assert np.isnan(all_of_them["trace"])


def test_larger_batches_tell_the_same_noise_within_their_sampling_error() -> None:
    (found,) = run_ranks(analyze, [0], small_store(), [1, 2, 3], 8)
    exact, *others = found["summaries"]
    assert exact["trace_error"] == 0.0
    for other in others:
        assert 0 < other["trace_error"] < exact["trace"]
        assert abs(other["trace"] - exact["trace"]) < 3 * other["trace_error"]


def test_two_ranks_find_what_one_finds_whatever_the_passes() -> None:
    sizes = [1, 5, 16, COUNT]  # of 16 there is one batch: the second rank has none
    (alone,) = run_ranks(analyze, [0], documents(), sizes, 3)
    first, second = run_ranks(analyze, [0, 0], documents(), sizes, 4)
    assert np.array_equal(first["full"], second["full"])
    assert str(first["summaries"]) == str(second["summaries"])
    np.testing.assert_allclose(first["full"], alone["full"], atol=1e-12)
    for one, other in zip(alone["summaries"], first["summaries"], strict=True):
        for name in ("trace", "trace_error", "noise_scale", "norm", "relative_deviation", "cosine", "values"):
            found, expected = ([*numbers({name: summary[name]})] for summary in (other, one))
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_sequences_that_are_all_the_same_do_not_deviate() -> None:
    tokens = np.append(np.tile(np.arange(SEQUENCE_LENGTH, dtype=np.uint16), COUNT), np.uint16(0))
    (found,) = run_ranks(analyze, [0], TokenTable([tokens], SEQUENCE_LENGTH), [1, 4], 8)
    for row in found["summaries"]:
        assert max(row["values"]["relative_deviation"]) < 1e-9
        assert min(row["values"]["cosine"]) > 1 - 1e-9
        assert row["trace"] < 1e-15
        assert row["request"] < 1e-15


def make_run(directory: Path, *overrides: str) -> Path:
    """A run directory as a run leaves it, with a model that was not trained."""
    settings = compose(overrides)
    splits = load_corpus(settings.data, settings.seed)
    objective = LanguageObjective.fitted(settings, splits.vocabulary, splits.labels)
    flat_model = FlatModel(objective.build(CPU, in_bf16=False), CPU, settings.precision)
    save_model(directory, flat_model, flat_model.initial_weights(), objective)
    facts = {
        "result": None,
        "settings": to_plain(settings),
        "corpus": {"source": splits.source, "digest": splits.digest},
    }
    (directory / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return directory


def make_run_on_rank(runtime: Runtime, directory: Path, *overrides: str) -> None:
    """A stream of its corpus ends with the process."""
    make_run(directory, *overrides)


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """Of 60 sequences of text to train on, and a model whose dropout would be noise of its own."""
    rng = np.random.default_rng(2)
    (tmp_path / "text").write_bytes(bytes(rng.integers(97, 107, size=70 * SEQUENCE_LENGTH).astype(np.uint8)))
    corpus = ("data=text", f"data.train=[{tmp_path / 'text'}]", "data.validation_fraction=0.14")
    return make_run(tmp_path / "run", *SMALL, "model.overrides.resid_pdrop=0.5", *corpus)


def analyze_all(runtime: Runtime, every_options: list[AnalysisOptions]) -> list[str]:
    """One analysis after the other; what each refuses, or nothing."""
    detail = []
    for options in every_options:
        try:
            analyze_run(runtime, options)
            detail.append("")
        except SettingsError as error:
            detail.append(str(error))
    return detail


def assert_is_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1200, 800)
    assert 10_000 < len(content) < 500_000


def test_a_table_a_picture_and_a_file_without_dropout(small_run: Path, tmp_path: Path) -> None:
    alone = AnalysisOptions(small_run, 40, (1, 8, 40), output=tmp_path / "alone")
    assert run_ranks(analyze_all, [0], [alone]) == [[""]]
    command = [sys.executable, str(ROOT / "launch" / "analyze_gradients.py"), str(small_run), "--nproc-per-node=2"]
    done = run([*command, "--sequences=40", "--batches=40,8,1,8", "--pass=7"], tmp_path)
    assert done.code == 0, done.output
    assert f"gradients.png and gradients.json: {small_run / 'gradients'}" in done.output.splitlines()
    assert "norm test asks for (eta 0.8)" in done.output
    results = []
    for directory in (tmp_path / "alone", small_run / "gradients"):
        assert sorted(path.name for path in directory.iterdir()) == ["gradients.json", "gradients.png"]
        assert_is_picture(directory / "gradients.png")
        results.append(json.loads((directory / "gradients.json").read_text()))
    for result in results:
        single, some, all_of_them = result["batches"]
        assert [row["batch"] for row in (single, some, all_of_them)] == [1, 8, 40]
        assert (result["split"], result["sequences"], result["targets"]) == ("train", 40, 40 * SEQUENCE_LENGTH)
        assert [len(row["values"]["relative_deviation"]) for row in result["batches"]] == [40, 5, 1]
        # With dropout these batches, of the same sequences as G, would have other gradients.
        assert all_of_them["relative_deviation"]["median"] < 1e-9
        assert all_of_them["trace"] is None
    found, expected = ([*numbers([result["norm"], result["batches"][0]["values"]])] for result in results)
    assert found == pytest.approx(expected, rel=1e-9)


def test_mistakes_are_reported_once_in_one_line_before_anything_is_written(small_run: Path, tmp_path: Path) -> None:
    (tmp_path / "no_model").mkdir()
    (tmp_path / "no_model" / "run.json").write_text((small_run / "run.json").read_text())
    mistakes = {
        f"RUN={tmp_path}: has no readable run.json (No such file or directory); name a run directory": AnalysisOptions(
            tmp_path
        ),
        f"RUN={tmp_path / 'no_model'}: has no model/": AnalysisOptions(tmp_path / "no_model"),
        "--sequences=61: the train split has 60": AnalysisOptions(small_run, 61),
        "--sequences=10: the validation split has 9": AnalysisOptions(small_run, 10, split="validation"),
        "--batches=21: 20 sequences are looked at": AnalysisOptions(small_run, 20, (1, 21)),
        "--sequences=0: must be >= 1": AnalysisOptions(small_run, 0),
        "--pass=0: must be >= 1": AnalysisOptions(small_run, micro_batch_size=0),
        f"--output={tmp_path / 'text'}: ": AnalysisOptions(small_run, output=tmp_path / "text"),
    }
    for detail in run_ranks(analyze_all, [0, 0], list(mistakes.values())):
        for line, start in zip(detail, mistakes, strict=True):
            assert line.startswith(start)
            assert "\n" not in line
    command = [sys.executable, str(ROOT / "launch" / "analyze_gradients.py"), str(small_run), "--batches=61"]
    done = run([*command, "--nproc-per-node=2"], tmp_path)
    assert done.code == 2, done.output
    assert done.output == "error: --batches=61: 60 sequences are looked at; take more (--sequences)\n"
    assert not (small_run / "gradients").exists()


def test_a_corpus_that_has_changed(small_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("another text " * 100)
    ((detail,),) = run_ranks(analyze_all, [0], [AnalysisOptions(small_run)])
    assert detail.startswith(f"RUN={small_run}: was trained on 1 text file(s)")


def test_labels_of_a_stream(tmp_path: Path) -> None:
    """Its validation split is what can be read in any order."""
    rng = np.random.default_rng(3)
    for name, count in (("train", 10), ("validation", 20)):
        rows = [f"{''.join(chr(97 + rng.integers(26)) for _ in range(3 + row % 7))},{row % 2}" for row in range(count)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    files = [f"data.{name}=[{tmp_path / name}.csv]" for name in ("train", "validation")]
    labelled = ("data.label_column=label", "data.num_labels=2", "data.streaming=true", "data.sequence_length=16")
    path = tmp_path / "run"
    run_ranks(make_run_on_rank, [0], path, "model=bert_nano", "precision=fp64", "data=csv", *files, *labelled)
    detail = run_ranks(
        analyze_all, [0, 0], [AnalysisOptions(path, batches=(1, 20)), AnalysisOptions(path, split="train")]
    )
    rule = "--split=train: 1 csv file(s), streamed cannot be read in any order; leave it out for the validation split"
    assert detail == [["", rule]] * 2
    result = json.loads((path / "gradients" / "gradients.json").read_text())
    assert (result["split"], result["sequences"], result["targets"]) == ("validation", 20, 20)
    assert result["batches"][1]["relative_deviation"]["median"] < 1e-9
    assert_is_picture(path / "gradients" / "gradients.png")

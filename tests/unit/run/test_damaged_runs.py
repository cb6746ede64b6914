"""A run directory may hold anything: whoever reads it says in one line what is wrong, or passes over what is no use."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.checkpoint.model import save_model
from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose, to_plain
from adloco_dist.data.encoding import ByteEncoder, Vocabulary
from adloco_dist.messages import strict_json
from adloco_dist.objective.architecture import model_config
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.models import build_model
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.report.one import page_of
from adloco_dist.report.source import read_source
from adloco_dist.report.words import sentences
from adloco_dist.run.directory import is_finished
from adloco_dist.run.journal import MetricsFile
from adloco_dist.run.reading import read_rows, read_run, read_trajectory, settings_of
from adloco_dist.run.rows import TrainerRow
from adloco_dist.sweep.points import Point
from adloco_dist.sweep.sweep import Row, show_table, write_csv
from adloco_dist.tools.evaluate import evaluate_run
from adloco_dist.tools.finished import load_model
from adloco_dist.tools.generate import continue_text
from helpers.support import CPU, small_module, small_settings

DEEP = b"[" * 100_000
RAW = [b"", b"[]", b"{}", b"null", b"3", b"\xff\xfe", DEEP, b'"x"', b"\0" * 64, b'{"settings": {}, "corpus": 1}']
VALUES: list[Any] = [None, True, -1, 3, 10**400, 1e999, "", "\ud800", "${oc.env:NO}", [], [None], {}, {"a": 1}, [[1]]]
RESULT: dict[str, Any] = {
    "stop": "budget=2rounds reached", "saved": "trainer 0", "trainer": 0, "validation_targets": 9,
    "candidates": [{"name": "trainer 0", "validation_loss": 2.25, "validation_perplexity": 9.5}],
    "rounds": 2, "tokens": 96, "bytes_sent": 7, "seconds": 1.5,
}  # fmt: skip
MERGE = {
    "survivor": 0, "shares": {"0": 0.5, "1": 0.5}, "policy": "worst_with_worst",
    "candidates": {trainer: {"request": 2.0, "bounded": 2.0, "is_finite": True} for trainer in "01"},
}  # fmt: skip
ROW: dict[str, Any] = {
    "ranks": [0, 1], "workers": 2, "total_batch": 4, "mode": "whole", "passes": 1, "request": 4.0, "bound": None,
    "noise_scale": None, "smoothed": {"trace": 1.0, "squared_norm": 0.5}, "notes": ["a note"],
}  # fmt: skip
ROWS = [
    {"round": 1, "trainer": 0, **ROW},
    {"round": 1, "trainer": 1, **ROW},
    {"round": 2, "trainer": 0, **ROW, "merge": MERGE},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as a run of the small model on a corpus that every machine has would leave it."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    settings = small_settings()
    objective = LanguageObjective.fitted(settings, ByteEncoder().vocabulary)
    flat_model = FlatModel(objective.build(CPU, in_bf16=False), CPU, settings.precision)
    save_model(directory, flat_model, flat_model.initial_weights(), objective)
    corpus = {"source": "text", "digest": "0"}
    facts = {"settings": strict_json(to_plain(settings)), "corpus": corpus, "result": RESULT}
    (directory / "run.json").write_text(json.dumps(facts))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return directory


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value in one place; `KeyError` as the value: without it."""
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if new is KeyError:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return copy


def read_by_all(run: Path) -> None:
    """Nothing but one line may come of it, and no text that could not be shown."""
    tools = [
        lambda: "\n".join(sentences(read_source(run))).encode(),
        lambda: read_trajectory("batching.replay", str(run)),
        lambda: settings_of(run, read_run(run)),
    ]
    for tool in tools:
        try:
            tool()
        except SettingsError as error:
            assert "\n" not in str(error)
            str(error).encode()


def read_by_sweep(run: Path) -> None:
    """A damaged run is a row of the table like any other."""
    row = Row.of(Point({"seed": "1"}, ("seed=1",), run), None)
    write_csv(run / "sweep.csv", [row])
    show_table([row])
    assert (row.state == "finished") == is_finished(run)


@pytest.mark.parametrize("content", RAW, ids=lambda raw: raw[:9].decode(errors="replace"))
def test_another_file_in_its_place(run: Path, content: bytes) -> None:
    for name in ("run.json", "metrics.jsonl"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(content)
        read_by_all(run)
        read_by_sweep(run)
        if name == "run.json":
            assert not is_finished(run)
            with pytest.raises(SettingsError, match=r"RUN=.*run\.json"):
                evaluate_run(run, None)
        else:
            with pytest.raises(SettingsError, match="holds no record of a round"):
                read_rows("RUN", str(run))
        (run / name).unlink()
        (run / name).mkdir()
        read_by_all(run)
        (run / name).rmdir()
        (run / name).write_bytes(before)


def test_another_value_in_any_place_of_run_json(run: Path) -> None:
    facts = {**json.loads((run / "run.json").read_text()), "settings": {"seed": 1, "model": {"overrides": {}}}}
    for path in places(facts):
        for value in (*VALUES, KeyError)[: None if path else -1]:
            (run / "run.json").write_text(json.dumps(changed(facts, path, value)))
            read_by_all(run)
            read_by_sweep(run)


def test_another_value_in_any_place_of_a_record(run: Path) -> None:
    odd_rows: list[Any] = []
    for path in places(ROWS[-1]):
        for value in (*VALUES, KeyError)[: None if path else -1]:
            odd_rows.append(changed(ROWS[-1], path, value))
            rows = [*ROWS[:-1], odd_rows[-1]]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            read_by_all(run)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *odd_rows]))
    assert page_of(read_source(run)).html("").encode(), "of all that were rows"


def test_a_damaged_result_is_not_that_of_a_finished_run(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    assert is_finished(run)
    for path, value in ((("result", "candidates"), 3), (("result", "stop"), 3), (("result", "saved"), "x")):
        (run / "run.json").write_text(json.dumps(changed(facts, path, value)))
        assert not is_finished(run)


def test_lines_that_are_no_records_are_counted_and_passed_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0] + lines[1] + b"\0\0\0\n" + lines[2] + lines[2][:40])
    assert [row.round for row in read_rows("RUN", str(run))] == [1, 1, 2]
    detail = capsys.readouterr().err
    assert detail.count("\n") == 1
    assert "2 of 5 lines are no records and are left out, the first of them line 3: " in detail
    (run / "metrics.jsonl").write_bytes(lines[2])
    with pytest.raises(SettingsError, match="has no round 1"):
        read_trajectory("batching.replay", str(run))


@pytest.mark.parametrize("end", [b'{"round": 3, "tra', b"\0" * 5000, b""])
def test_half_a_line_is_cut_off_before_more_are_written(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"round": 1}\n{"round": 2}\n' + end)
    metrics = MetricsFile(tmp_path, keep_bytes=10_000)
    metrics.write([TrainerRow(round=3, trainer=0)])
    metrics.close(None)
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert metrics.state() == {"metrics_bytes": path.stat().st_size}


# --- the model


def edit_config(run: Path, **fields: Any) -> None:
    path = run / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def warm(run: Path, *overrides: str) -> Any:
    settings = compose(["model=pretrained", f"model.warm_start={run}", *overrides])
    return build_model(settings.model, model_config(settings.model, Vocabulary(23), 12), 0)


@pytest.mark.parametrize(
    "fields",
    [{"n_layer": 3}, {"n_layer": 1}, {"n_embd": 32}, {"vocab_size": 300}, {"n_positions": 2048},
     {"n_layer": 100_000}, {"n_embd": 10_000_000}, {"vocab_size": 10**12}, {"model_type": "nonsense"}, {"n_head": 3}],
    ids=str,
)  # fmt: skip
def test_weights_of_another_shape_than_their_config(run: Path, fields: dict[str, Any]) -> None:
    settings = small_settings()
    load_model(run, settings)
    edit_config(run, **fields)
    with pytest.raises(SettingsError, match=r"config\.json: (has|does not fit)"):
        load_model(run, settings)
    with pytest.raises(SettingsError, match=r"config\.json: (has|does not fit)"):
        continue_text(run, "text", 3, 0.0, 0)
    (run / "model" / "manifest.json").unlink()
    with pytest.raises(SettingsError, match=r"do not fit|cannot be read|asks for"):
        load_model(run, settings)
    with pytest.raises(SettingsError, match=r"do not fit|cannot be read|no such model"):
        warm(run)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "manifest.json"])
def test_any_file_of_a_model(run: Path, name: str) -> None:
    path = run / "model" / name
    content = path.read_bytes()
    damaged = {*RAW, content[:-20], b"\xff" * 8 + content[8:], bytes(len(content))}
    for whether_manifest in (True, False):
        if not whether_manifest and name != "manifest.json":
            (run / "model" / "manifest.json").unlink()
        for raw in sorted(damaged):
            path.write_bytes(raw)
            with pytest.raises(SettingsError, match=r"^RUN=[^\n]*$"):
                continue_text(run, "text", 3, 0.0, 0)
    path.write_bytes(content)
    assert continue_text(run, "text", 3, 0.0, 0).startswith("text")


def test_a_flipped_bit_of_the_weights(run: Path) -> None:
    path = run / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"model\.safetensors: does not fit its digest.*remove manifest\.json"):
        load_model(run, small_settings())


def test_weights_that_are_missing_or_left_over_in_a_warm_start(tmp_path: Path) -> None:
    small_module(small_settings("model.overrides.n_layer=3")).save_pretrained(tmp_path / "model")
    assert warm(tmp_path).config.n_layer == 3
    config: Settings = compose(["model=pretrained", f"model.warm_start={tmp_path}"])
    classifier = model_config(config.model, Vocabulary(23), 12, num_labels=4)
    assert build_model(config.model, classifier, 0, is_classifier=True).config.num_labels == 4, "its head is new"
    edit_config(tmp_path, n_layer=2)
    for is_classifier in (True, False):
        with pytest.raises(SettingsError, match=r"do not fit its config: holds transformer\.h\.2\."):
            shorter = model_config(config.model, Vocabulary(23), 12, num_labels=4 if is_classifier else None)
            build_model(config.model, shorter, 0, is_classifier)

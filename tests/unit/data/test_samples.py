"""data.sample: the first documents of a corpus, and budget=2.5epochs: how often they are read."""

from pathlib import Path

import pytest

from adloco_dist.config import Amount, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import files_of, load_corpus
from adloco_dist.setup.agreement import with_known_budget
from helpers.row_files import json_lines


def documents(folder: Path) -> list[str]:
    for name in range(6):
        (folder / f"{name}.txt").write_text(f"{name}" * 200)
    (folder / "rows.jsonl").write_text("\n".join(json_lines(9)))
    return ["data.sequence_length=8", "data.validation_fraction=0.4"]


def test_only_the_first_documents_are_read(tmp_path: Path) -> None:
    common = documents(tmp_path)
    files = ["data=text", f"data.train=[{tmp_path}/*.txt]", *common]
    whole, three = load_corpus(compose(files).data), load_corpus(compose([*files, "data.sample=3"]).data)
    held = {whole.train.num_sequences: 6, three.train.num_sequences: 3}
    assert sorted(held.values()) == [3, 6], "fewer sequences"
    assert three.source == "3 text file(s)"
    ids = {int(token) for part in (three.table.parts if three.table else []) for token in part}  # type: ignore[attr-defined]
    assert not {*b"345"} & ids, "of the first three files"
    rows = compose(["data=json", f"data.train=[{tmp_path}/rows.jsonl]", *common, "data.sample=4"]).data
    assert [document.row for document in files_of(rows)[0].documents()] == [0, 1, 2, 3]
    more = load_corpus(compose([*files, "data.sample=99"]).data)
    assert more.digest == whole.digest, "all, where there are fewer"


def test_a_budget_in_epochs_is_one_in_tokens(tmp_path: Path) -> None:
    files = ["data=text", f"data.train=[{tmp_path}/*.txt]", *documents(tmp_path)]
    settings = compose([*files, "budget=2.5epochs"])
    splits = load_corpus(settings.data)
    assert splits.train.num_sequences
    known = with_known_budget(settings, splits)
    assert known.budget_amount == Amount(round(2.5 * splits.train.num_sequences) * 8, "tokens")
    other = compose([*files, "budget=20rounds"])
    assert with_known_budget(other, splits) is other


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sample=0"], "data.sample=0: must be >= 1"),
        (["data=tokens", "data.train=[a.npy]", "data.sample=5"], "data.sample=5: token files have no documents"),
        (["data=c4", "data.sample=5"], "data.sample=5: .*streams"),
        (["budget=0epochs"], "budget=0epochs: must be a number > 0"),
    ],
)
def test_what_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        compose(overrides)

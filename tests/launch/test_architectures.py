"""Models of other architectures, trained and used by the commands."""

from pathlib import Path

from helpers.commands import documented, facts, run, train_command, use


def test_a_classifier_beats_the_majority_class(tmp_path: Path) -> None:
    """Which package a piece of text is from; the majority class is that of `check_data`."""
    size = [
        *documented("docs/guide/models.md", "python launch/train.py model=bert_nano")[2:],
        "data.sequence_length=128",
    ]
    pool = [
        "budget=800000tokens",
        "pool.trainers=2",
        "pool.workers_per_trainer=1",
        "algorithm=localsgd",
        "merge=none",
        "inner.lr=3e-3",
        "batching.local_batch=8",
    ]
    arguments = [*size, *pool, "evaluation.every=null", "tracking=none", "run.directory=run"]
    done = run(train_command(*arguments), tmp_path)
    assert done.code == 0, done.output
    result, corpus = facts(tmp_path / "run")["result"], facts(tmp_path / "run")["corpus"]
    accuracy = max(candidate["validation_accuracy"] for candidate in result["candidates"])
    shown = use("check_data.py", "data=python_packages", "--samples", "0", "--sequences", "100000", cwd=tmp_path).output
    shares = [line.split() for line in shown.splitlines() if line.split()[:1] and line.split()[0] in corpus["labels"]]
    majority = max(float(share[2].rstrip("%")) / 100 for share in shares)
    assert len(shares) == 6 and 0.2 < majority < accuracy, (majority, accuracy)
    done = use("evaluate.py", "run", cwd=tmp_path)
    assert done.code == 0 and "accuracy" in done.output, done.output
    done = use("generate.py", "run", "x", cwd=tmp_path)
    assert done.code == 2 and "predicts labels" in done.output

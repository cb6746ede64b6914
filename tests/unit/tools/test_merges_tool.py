"""The drawing of a run's merges, from records made by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.run.rows import Record
from adloco_dist.tools.merges import draw_merges, main

ComputeSlot = tuple[list[int], int, Sequence[int]]
"""Of a trainer over some rounds: ranks, workers, total batch of every round."""


def slot(*ranks: int, batches: Sequence[int] = (4,), workers: int | None = None) -> ComputeSlot:
    return list(ranks), workers or len(ranks), batches


def merge(
    survivor: int, shares: Mapping[int, float], requests: Sequence[float | None], idle: Sequence[int] = ()
) -> dict[str, Any]:
    """As a record holds it: read back from JSON."""
    return {
        "survivor": survivor,
        "shares": {str(trainer): share for trainer, share in shares.items()},
        "candidates": {
            str(trainer): {"request": request, "bounded": 8.0 if request is None else request, "is_finite": share > 0}
            for (trainer, share), request in zip(shares.items(), requests, strict=True)
        },
        "policy": "worst_with_worst",
        "idle_ranks": list(idle),
    }


def rounds(first: int, slots: Mapping[int, ComputeSlot], *merges: dict[str, Any]) -> list[Record]:
    """The rows of the rounds from `first` on; the merges come before them."""
    rows: list[Record] = [
        {"round": first + step, "trainer": trainer, "ranks": ranks, "workers": workers, "total_batch": batch}
        for trainer, (ranks, workers, batches) in slots.items()
        for step, batch in enumerate(batches)
    ]
    for detail in merges:
        next(row for row in rows if (row["round"], row["trainer"]) == (first, detail["survivor"]))["merge"] = detail
    return rows


def drawn(*records: list[Record], final: Mapping[str, str] | None = None) -> list[str]:
    lines = draw_merges([row for rows in records for row in rows], final or {})
    assert all(line == line.rstrip() for line in lines)
    return lines


def test_four_trainers_become_one_in_three_merges() -> None:
    lines = drawn(
        rounds(1, {trainer: slot(trainer, batches=(4, 5, 9)) for trainer in range(4)}),
        rounds(4, {0: slot(0), 1: slot(1, 3), 2: slot(2)}, merge(1, {1: 0.6, 3: 0.4}, (3.0, 2.0))),
        rounds(
            5,
            {0: slot(0, 1, 3, batches=(8, 7, 6)), 2: slot(2, batches=(4, 5, 4))},
            merge(0, {0: 0.75, 1: 0.25}, (3.5, 2.48123)),
        ),
        rounds(8, {2: slot(0, 1, 2, 3, batches=(20,))}, merge(2, {0: 0.45, 2: 0.55}, (4.1, 7.9))),
        final={"trainer 2": "perplexity 80.25"},
    )
    assert lines == [
        "             trainer 0             trainer 1           trainer 2            trainer 3",
        "rounds 1-3   │ {0} 1 worker        │ {1} 1 worker      │ {2} 1 worker       │ {3} 1 worker",
        "             │ batch 4-9           │ batch 4-9         │ batch 4-9          │ batch 4-9",
        "             │                     │                   │                    │",
        "             │                     │ 0.60              │                    │ 0.40",
        "             │                     │◄──────────────────┼────────────────────╯",
        "             │                     │                   │",
        "round 4      │ {0} 1 worker        │ {1,3} 2 workers   │ {2} 1 worker",
        "             │ batch 4             │ batch 4           │ batch 4",
        "             │                     │                   │",
        "             │ 0.75                │ 0.25              │",
        "             │◄────────────────────╯                   │",
        "             │                                         │",
        "rounds 5-7   │ {0,1,3} 3 workers                       │ {2} 1 worker",
        "             │ batch 8-6                               │ batch 4",
        "             │                                         │",
        "             │ 0.45                                    │ 0.55",
        "             ╰────────────────────────────────────────►│",
        "                                                       │",
        "round 8                                                │ {0-3} 4 workers",
        "                                                       │ batch 20",
        "end                                                    ▼ perplexity 80.25",
        "",
        "before round 4: trainer 3 (asked for 2) into 1 (asked for 3), worst_with_worst; "
        "ranks {1,3} now average together",
        "before round 5: trainer 1 (asked for 2.481) into 0 (asked for 3.5), worst_with_worst; "
        "ranks {0,1,3} now average together",
        "before round 8: trainer 0 (asked for 4.1) into 2 (asked for 7.9), worst_with_worst; "
        "ranks {0-3} now average together",
    ]


def test_two_merges_in_one_round_whose_lanes_cross() -> None:
    lines = drawn(
        rounds(1, {trainer: slot(trainer) for trainer in range(4)}),
        rounds(
            2,
            {0: slot(0, 3), 2: slot(2, workers=2)},
            merge(0, {0: 0.5, 3: 0.5}, (None, None)),
            merge(2, {1: 0.25, 2: 0.75}, (1.0, None)),
        ),
    )
    assert lines == [
        "          trainer 0           trainer 1        trainer 2         trainer 3",
        "round 1   │ {0} 1 worker      │ {1} 1 worker   │ {2} 1 worker    │ {3} 1 worker",
        "          │ batch 4           │ batch 4        │ batch 4         │ batch 4",
        "          │                   │                │                 │",
        "          │ 0.50              │                │                 │ 0.50",
        "          │◄──────────────────┼────────────────┼─────────────────╯",
        "          │                   │                │",
        "          │                   │ 0.25           │ 0.75",
        "          │                   ╰───────────────►│",
        "          │                                    │",
        "round 2   │ {0,3} 2 workers                    │ {2} 2 workers",
        "          │ batch 4                            │ batch 4",
        "end       ▼ unknown                            ▼ unknown",
        "",
        "before round 2: trainer 3 (asked for any batch, bounded to 8)"
        " into 0 (asked for any batch, bounded to 8), worst_with_worst; "
        "ranks {0,3} now average together",
        "before round 2: trainer 1 (asked for 1) into 2 (asked for any batch, bounded to 8), worst_with_worst; "
        "all on rank 2",
    ]


def test_three_become_one_from_both_sides_or_from_one() -> None:
    before = rounds(1, {trainer: slot(trainer) for trainer in range(3)})
    middle = drawn(before, rounds(2, {1: slot(0, 1, 2)}, merge(1, {0: 0.2, 1: 0.5, 2: 0.3}, (2.0, 5.0, 3.0))))
    assert middle[3:7] == [
        "          │                │                   │",
        "          │ 0.20           │ 0.50              │ 0.30",
        "          ╰───────────────►│◄──────────────────╯",
        "                           │",
    ]
    last = drawn(before, rounds(2, {2: slot(0, 1, 2)}, merge(2, {0: 0.2, 1: 0.3, 2: 0.5}, (2.0, 3.0, 5.0))))
    assert last[5] == "          ╰────────────────┴───────────────►│"
    assert last[-1] == (
        "before round 2: trainers 0 (asked for 2), 1 (asked for 3) into 2 (asked for 5), worst_with_worst; "
        "ranks {0-2} now average together"
    )


def test_a_lane_that_has_ended_is_not_crossed() -> None:
    lines = drawn(
        rounds(1, {trainer: slot(trainer) for trainer in range(3)}),
        rounds(2, {0: slot(0), 2: slot(1, 2)}, merge(2, {1: 0.5, 2: 0.5}, (2.0, 2.0))),
        rounds(3, {0: slot(0, 1, 2)}, merge(0, {0: 0.5, 2: 0.5}, (2.0, 2.0))),
    )
    assert [line for line in lines if "◄" in line] == ["          │◄───────────────────────────────────╯"]


def test_a_member_that_is_not_finite_and_idle_ranks() -> None:
    lines = drawn(
        rounds(1, {trainer: slot(trainer) for trainer in range(3)}),
        rounds(2, {1: slot(1), 2: slot(2)}, merge(1, {0: 0.0, 1: 1.0}, (9.0, 2.0), idle=[0])),
        rounds(3, {2: slot(2)}, merge(2, {1: 0.4, 2: 0.6}, (2.0, 3.0), idle=[0, 1])),
    )
    assert lines[4:6] == [
        "          │ left out       │ 1.00           │",
        "          ╰───────────────►│                │",
    ]
    assert lines[-2:] == [
        "before round 2: trainer 0 (left out: not finite) into 1 (asked for 2), worst_with_worst; "
        "all on rank 1; rank 0 idle",
        "before round 3: trainer 1 (asked for 2) into 2 (asked for 3), worst_with_worst; "
        "all on rank 2; ranks {0,1} idle",
    ]


def test_workers_dealt_to_a_trainer_that_does_not_merge() -> None:
    lines = drawn(
        rounds(1, {trainer: slot(trainer) for trainer in range(3)}),
        rounds(2, {0: slot(0, 2), 1: slot(1)}, merge(1, {1: 0.5, 2: 0.5}, (2.0, 2.0))),
    )
    assert lines[7] == "round 2   │ {0,2} 2 workers   │ {1} 1 worker"


def test_no_merges() -> None:
    records = rounds(1, {0: slot(0, 1, 3, batches=(4, 6)), 1: slot(2, batches=(4, 4))})
    lines = drawn(records, final={"trainer 0": "perplexity 200"})
    assert lines == [
        "             trainer 0             trainer 1",
        "rounds 1-2   │ {0,1,3} 3 workers   │ {2} 1 worker",
        "             │ batch 4-6           │ batch 4",
        "end          ▼ perplexity 200      ▼ unknown",
        "",
        "no trainers merged",
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = rounds(1, {0: slot(0), 1: slot(1)})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    main([str(tmp_path / "metrics.jsonl")])
    assert capsys.readouterr().out.splitlines() == draw_merges(records, {})
    candidate = {"name": "trainer 1", "validation_loss": 2.25, "validation_perplexity": 9.5}
    result = {"stop": "budget.rounds=1 reached", "saved": "trainer 1", "candidates": [candidate]}
    facts = {"settings": {}, "corpus": {"source": "", "digest": ""}, "result": result}
    (tmp_path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    main([str(tmp_path)])
    assert "▼ perplexity 9.500" in capsys.readouterr().out
    (tmp_path / "early.jsonl").write_text('{"round": 0, "trainer": 0, "ranks": [0]}', encoding="utf-8")
    for name, detail in (("none.jsonl", "cannot be read"), ("early.jsonl", "holds no round")):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / name)])
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("\n")) == (2, 1)
        assert error.startswith(f"error: RUN={tmp_path / name}: ")
        assert detail in error

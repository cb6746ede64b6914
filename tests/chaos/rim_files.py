"""Damage to what a run has left, met by every tool that reads it: it says which file it is, or continues without."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adloco_dist.run.manifest import digest_of, read_manifest, write_manifest
from chaos.rim_case import ENDED, FAILED, RANK, REFUSED, TOOL, Case, Prepare, bare, done, rename, train
from helpers.records import edited_json

Content = Callable[[bytes], bytes | None]
"""What becomes of a file; None: a folder in its place."""

# --- contents


def to(content: bytes) -> Content:
    return lambda _: content


def edited(**fields: Any) -> Content:
    """Of JSON: other values, as `edited_json` takes them."""
    return lambda content: edited_json(content, fields)


def folder_of(_: bytes) -> None:
    return None


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_line(line: bytes) -> Content:
    """One more line after the third."""
    return lambda content: b"\n".join([*content.split(b"\n")[:3], line, *content.split(b"\n")[3:]])


def cut_in_line(content: bytes) -> bytes:
    return content[:-40]


def flipped(content: bytes) -> bytes:
    """A high bit of the exponent of the last weight."""
    return content[:-1] + bytes([content[-1] ^ 64])


def absurd_header(content: bytes) -> bytes:
    return b"\xff" * 7 + b"\x7f" + content[8:]


def other_types(content: bytes) -> bytes:
    """Every number of every row is a word, and the other way round."""
    rows = [json.loads(line) for line in content.splitlines()]
    return b"".join(json.dumps({key: str(row[key]) for key in row}).encode() + b"\n" for row in rows)


def damaged(path: str, content: Content) -> Prepare:
    """A file of a folder, or the first of those that a pattern names, damaged."""

    def prepare(folder: Path) -> None:
        file = min(folder.glob(path))
        new = content(file.read_bytes())
        file.unlink()
        if new is None:
            file.mkdir()
        else:
            file.write_bytes(new)

    return prepare


def in_turn(*steps: Prepare) -> Prepare:
    return lambda folder: [step(folder) for step in steps]


def without(path: str) -> Prepare:
    return lambda folder: min(folder.glob(path)).unlink()


def unended(folder: Path) -> None:
    """As if the run had been killed at its end: it resumes from its newest checkpoint."""
    damaged("run/run.json", edited(result=None))(folder)


# --- tools

EVALUATE = "evaluate"
TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    EVALUATE: (bare("evaluate.py", "run", "--sequences", "8"), TOOL),
    "generate": (bare("generate.py", "run", "12 is", "--tokens", "3"), TOOL),
    "analyze_gradients": (bare("analyze_gradients.py", "run", "--sequences", "8", "--batches", "1,2"), RANK),
    "replay": (train("batching.request=replay", "batching.replay=run", "run.directory=new"), RANK),
    "warm start of the run": (train("model=pretrained", "model.warm_start=run", "run.directory=new"), RANK),
    "warm start of its model": (train("model=pretrained", "model.warm_start=run/model", "run.directory=new"), RANK),
    "resume": (train("run.directory=run", "run.unfinished=resume"), RANK),
    "sweep": (train("-m", "seed=0,1", "hydra.sweep.dir=."), TOOL),
}
"""The command, and who refuses. A sweep finds the run under the name that the run has as its point."""
POINT = "seed=0"

RUN_FILE = {
    "empty": to(b""), "a list": to(b"[]"), "null": to(b"null"), "an empty object": to(b"{}"), "a number": to(b"7"),
    "cut in half": half, "invalid UTF-8": to(b"\xff\xfe{}"), "zeros": to(bytes(4096)),
    "nested deeply": to(b"[" * 100_000),
    "a folder": folder_of, "settings of another version": edited(settings__pool={"coaches": 3}),
    "settings that are a list": edited(settings=[1]), "settings of other types": edited(settings__seed="many"),
    "a result without candidates": edited(result__candidates=KeyError),
    "a result that is a word": edited(result="good"),
    "no result": edited(result=KeyError), "a corpus that is a number": edited(corpus=7),
}  # fmt: skip
METRICS = {
    "cut in the middle of a line": cut_in_line, "a line of garbage": with_line(b"\x00\xff{garbage"),
    "a line that is a list": with_line(b"[1, 2]"), "a huge number": with_line(b'{"round": 1e999, "trainer": 0}'),
    "empty": to(b""), "rows of other types": other_types, "a folder": folder_of,
}  # fmt: skip
CONFIG = {
    "another number of layers": edited(num_hidden_layers=3), "fewer layers": edited(num_hidden_layers=1),
    "100,000 layers": edited(num_hidden_layers=100_000), "hidden size 10 million": edited(hidden_size=10_000_000),
    "no JSON": to(b"layers: 2"), "a list": to(b"[]"), "an unknown model_type": edited(model_type="nonsense"),
    "no model_type": edited(model_type=KeyError), "a vocabulary of 10^12": edited(vocab_size=10**12),
    "layers in words": edited(num_hidden_layers="two"), "empty": to(b""), "a folder": folder_of,
}  # fmt: skip
WEIGHTS = {
    "empty": to(b""), "cut": half, "an absurd header": absurd_header, "a flipped bit": flipped, "a folder": folder_of,
    "an empty header": to(b"\x02" + bytes(7) + b"{}"),
}  # fmt: skip
TOKENIZER = {"garbage": to(b"\x00garbage"), "an empty object": to(b"{}"), "empty": to(b"")}

WHOLE_RUN = ("evaluate", "generate", "analyze_gradients")
OF_MODEL = ("evaluate", "generate", "warm start of the run", "analyze_gradients", "warm start of its model")
READERS: dict[str, tuple[dict[str, Content], tuple[str, ...], int]] = {
    "run.json": (RUN_FILE, (*WHOLE_RUN, "resume", "sweep"), 2),
    "metrics.jsonl": (METRICS, ("replay", "resume"), 2),
    "model/config.json": (CONFIG, OF_MODEL, 2),
    "model/model.safetensors": (WEIGHTS, OF_MODEL, 2),
    "model/tokenizer.json": (TOKENIZER, ("generate",), 1),
    "model/tokenizer_config.json": (TOKENIZER, ("generate",), 1),
}
"""Of each file: its damages, who reads it, and how many of them meet each damage, in turn."""
UNSIGNED = ", without the digests"
"""Of the model, as another program would have written it."""
GOES_ON = {
    "metrics.jsonl": {"cut in the middle of a line", "a line of garbage", "a line that is a list", "a huge number"},
}
"""What tools pass over, and say so."""


def of_file(file: str, what: str, content: Content, tool: str) -> Case:
    words, by = TOOLS[tool]
    name, prepare = f"{tool} of a run whose {file} is damaged: {what}", damaged(f"run/{file}", content)
    detail = (Path(file).parts[0],)
    if what.endswith(UNSIGNED):
        prepare = in_turn(prepare, lambda folder: (folder / "run/model/manifest.json").unlink(missing_ok=True))
    if tool == "sweep":  # the damaged run is made again or fails alone; the other one is run
        steps = (prepare, rename("run", POINT))
        return Case(name, words, (), codes=(ENDED, FAILED), has_run=True, prepare=steps, leaves=("sweep.csv",))
    if tool == "resume":
        steps = (unended, prepare) if file != "run.json" else (prepare,)
        if what == "a folder":
            return Case(name, words, detail, by=by, has_run=True, prepare=steps)
        # It resumes from its checkpoints, which have all that is needed, and writes these files again; or, where the
        # file says no more what the run was, it is refused.
        codes = (ENDED, REFUSED) if file == "run.json" else (ENDED,)
        return Case(name, words, (), codes=codes, has_run=True, prepare=steps, leaves=("run/model/model.safetensors",))
    if what in GOES_ON.get(file, ()):
        return done(name, words, "passed over", has_run=True, prepare=(prepare,))
    return Case(name, words, detail, by=by, has_run=True, prepare=(prepare,))


def of_checkpoints() -> Iterator[Case]:
    """The newest is damaged: the one before is taken. Both are: the run is archived, and starts from the beginning."""
    state, manifest, part = "state.json", "manifest.json", "trainer-?.safetensors"
    damages: dict[str, tuple[str, Content]] = {
        "its state emptied": (state, to(b"")), "its state a folder": (state, folder_of), "its state cut": (state, half),
        "its manifest a folder": (manifest, folder_of), "its manifest a list": (manifest, to(b"[]")),
        "its manifest null": (manifest, to(b"null")), "its manifest emptied": (manifest, to(b"")),
        "its manifest of other types": (manifest, edited(parts=7)), "a part longer": (part, lambda raw: raw + b"\0"),
        "a part emptied": (part, to(b"")), "a part a folder": (part, folder_of), "a flipped bit": (part, flipped),
    }  # fmt: skip
    words, _ = TOOLS["resume"]
    more: dict[str, Any] = {"has_run": True, "leaves": ("run/model/model.safetensors",)}
    for what, (file, content) in damages.items():
        prepare = (unended, in_newest(damaged(file, content)))
        yield done(f"newest checkpoint: {what}", words, "is skipped", "resumes from", prepare=prepare, **more)
    prepare = (unended, in_newest(without(part)))
    yield done("newest checkpoint: a part missing", words, "is skipped", "resumes from", prepare=prepare, **more)
    prepare = (unended, in_newest(of_other_version))
    yield done("newest checkpoint: of another version", words, "is skipped", "resumes from", prepare=prepare, **more)
    prepare = (
        unended,
        lambda folder: [damaged(state, to(b""))(path) for path in (folder / "run/checkpoints").iterdir()],
    )
    yield done("no whole checkpoint", words, "is skipped", prepare=prepare, **more)


def in_newest(prepare: Prepare) -> Prepare:
    return lambda folder: prepare(max((folder / "run" / "checkpoints").iterdir()))


def of_other_version(checkpoint: Path) -> None:
    """A state that this version does not understand, with a manifest that fits it."""
    state = checkpoint / "state.json"
    state.write_text(json.dumps({"version": 99, **dict.fromkeys(json.loads(state.read_text()), 7)}))
    write_manifest(checkpoint, {**read_manifest(checkpoint), state.name: digest_of(state)})


def file_cases() -> Iterator[Case]:
    for file, (damages, tools, times) in READERS.items():
        for number, (what, content) in enumerate(damages.items()):
            turns = range(times * number, times * (number + 1))
            for turn, tool in enumerate(dict.fromkeys(tools[turn % len(tools)] for turn in turns)):
                is_unsigned = turn and file.startswith("model") and content is not flipped
                yield of_file(file, what + UNSIGNED * is_unsigned, content, tool)
    for file, tools in (("model/config.json", OF_MODEL), ("model/model.safetensors", OF_MODEL[:3])):
        for tool in tools:
            words, by = TOOLS[tool]
            prepare = (without(f"run/{file}"),)
            yield Case(
                f"{tool} of a run whose {file} is missing", words, ("model",), by=by, has_run=True, prepare=prepare
            )
    for tool in ("evaluate", "analyze_gradients", "replay", "warm start of the run", "generate"):
        words, by = TOOLS[tool]
        yield Case(f"{tool} of a folder that does not exist", words, ("run",), by=by)
    yield from of_checkpoints()

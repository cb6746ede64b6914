"""Corpora with something wrong in them or in their names: refused with the place, or taken as the user meant it."""

import gzip
import json
import os
from collections.abc import Iterator

from chaos.rim_case import HERE, MODEL, RANK, TOOL, Case, bare, done, make, refused, train, write

ROWS = [json.dumps({"id": number, "text": f"{number * number} is the square of {number}"}) for number in range(600)]
BROKEN = "\n".join([*ROWS[:150], '{"id": 150, "te', *ROWS[150:]]) + "\n"
NULL = "\n".join([*ROWS[:150], '{"id": 150, "text": null}', *ROWS[150:]]) + "\n"
MISSING = "\n".join([*ROWS[:150], '{"id": 150}', *ROWS[150:]]) + "\n"
NUMBER = "\n".join([*ROWS[:150], '{"id": 150, "text": 7}', *ROWS[150:]]) + "\n"
CSV = ["id,text", *(f'{number},"{number * number} is its square"' for number in range(600))]
UNCLOSED = "\n".join([*CSV[:150], '150,"no end', *CSV[150:]]) + "\n"
WHOLE = gzip.compress(("\n".join(ROWS) + "\n").encode(), mtime=0)
LINES = "".join(f"{number**3} is the cube of {number}.\n" for number in range(1500))
GARBAGE = bytes(number * 73 % 256 for number in range(5000))

DAMAGED: dict[str, tuple[str, bytes | str, str]] = {
    "a broken JSON row": ("rows.jsonl", BROKEN, "150"), "an unclosed quote": ("rows.csv", UNCLOSED, "149"),
    "a truncated gzip": ("rows.jsonl.gz", WHOLE[:-800], "byte"), "a null text": ("rows.jsonl", NULL, "null"),
    "a missing text": ("rows.jsonl", MISSING, "150"),
    "garbage in JSON": ("rows.jsonl", GARBAGE, "rows.jsonl"), "garbage in csv": ("rows.csv", GARBAGE, "rows.csv"),
    "garbage in parquet": ("rows.parquet", GARBAGE, "rows.parquet"),
    "garbage in gzip": ("rows.jsonl.gz", GARBAGE, "rows.jsonl.gz"),
    "UTF-16 in JSON": ("rows.jsonl", "\n".join(ROWS).encode("utf-16"), "rows.jsonl"),
    "UTF-16 in csv": ("rows.csv", "\n".join(CSV).encode("utf-16"), "rows.csv"),
}  # fmt: skip
"""A file, and what of its place is reported."""
KEPT = ("a broken JSON row", "an unclosed quote", "a truncated gzip", "a null text", "a missing text")
"""Of which something is left that can be trained on."""

NAMES = ("a b.txt", "[1].txt", "k=v.txt", "it's.txt", "grün.txt", "日本語.txt", "a,b.txt", "{x}.txt", "$HOME.txt",
         "back\\slash.txt", 'quo"te.txt', "#hash.txt", "100%.txt", "~tilde.txt", "a:b.txt", "(p).txt", "-dash.txt",
         "*.txt", "[bold]x.txt", "\x1b[31mred.txt")  # fmt: skip


def of_format(file: str) -> str:
    return next(name for name in ("json", "csv", "parquet") if f".{name}" in file)


def damaged_corpora() -> Iterator[Case]:
    for number, (what, (file, content, place)) in enumerate(DAMAGED.items()):
        settings = (f"data={of_format(file)}", f"data.train=[{file}]")
        prepare = (write(file, content),)
        yield refused(f"corpus: {what}", train(*settings), file, place, by=RANK, prepare=prepare)
        words = (*settings, "data.damaged=skip")
        if what in KEPT:
            detail = (file, "left out" if what != "a truncated gzip" else "row")
            if number % 2:
                yield done(f"check_data: {what}, left out", bare("check_data.py", *words), *detail, prepare=prepare)
            else:
                ending = ("run.directory=new", "budget=1rounds")
                yield done(
                    f"corpus: {what}, left out", train(*words, *ending), *detail, prepare=prepare, leaves=(MODEL,)
                )
        else:
            check = bare("check_data.py", *words)
            yield refused(f"check_data: {what}, nothing left", check, file, by=TOOL, prepare=prepare)
    prepare = (write("rows.jsonl", NUMBER),)
    words = train("data=json", "data.train=[rows.jsonl]")
    yield refused("corpus: a number for a text", words, "row 150", "text", by=RANK, prepare=prepare)
    prepare = (write("rows.jsonl", "\n".join(ROWS)),)
    words = train("data=json", "data.train=[rows.jsonl]", "data.text_column=body")
    yield refused("corpus: no such column", words, "data.text_column=body", "text", by=RANK, prepare=prepare)
    prepare = (write("rows.jsonl", b"\xef\xbb\xbf" + "\n".join(ROWS).encode()),)
    words = train("data=json", "data.train=[rows.jsonl]", "run.directory=new")
    yield done("corpus: a byte order mark", words, prepare=prepare, leaves=(MODEL,))


def odd_files() -> Iterator[Case]:
    for what, prepare, place in (
        ("empty", write("odd.txt", b""), "odd.txt"), ("a directory", make("odd.txt"), "odd.txt"),
        ("a FIFO", lambda folder: os.mkfifo(folder / "odd.txt"), "odd.txt"),
        ("a broken link", lambda folder: (folder / "odd.txt").symlink_to("nowhere"), "odd.txt"),
        ("a device", lambda folder: (folder / "odd.txt").symlink_to("/dev/null"), "odd.txt"),
        ("shorter than a sequence", write("odd.txt", b"short"), "data"),
        ("not readable", write("odd/odd.npy", b"\x93NUMPY garbage"), "odd"),
    ):  # fmt: skip
        is_tokens = what == "not readable"
        name, corpus = ("odd/odd.npy", "tokens") if is_tokens else ("odd.txt", "text")
        settings = (f"data={corpus}", f"data.train=[{name}]")
        yield refused(f"a corpus that is {what}", train(*settings), place, by=RANK, prepare=(prepare,))
        check = bare("check_data.py", *settings, "data.sequence_length=32")
        yield refused(f"check_data of a corpus that is {what}", check, place, by=TOOL, prepare=(prepare,))
    for what, content in (("binary garbage", GARBAGE * 3), ("UTF-16", LINES.encode("utf-16")),
                          ("a byte order mark", b"\xef\xbb\xbf" + LINES.encode())):  # fmt: skip
        words = train("data.train=[odd.txt]", "run.directory=new", "budget=1rounds")
        yield done(f"a corpus of bytes: {what}", words, prepare=(write("odd.txt", content),), leaves=(MODEL,))


def odd_names() -> Iterator[Case]:
    """A file that exists is taken as the shell gave it, relative and absolute, in a list and alone."""
    for number, name in enumerate(NAMES):
        value = (f"[{name}]", f"[{HERE}/{name}]", name, f"[corpus.txt,{name}]")[number % 4]
        settings = ("data=text", f"data.train={value}", "data.sequence_length=32")
        prepare = (write(name, LINES),)
        if number % 5:
            yield done(f"a corpus called {name!r}", bare("check_data.py", *settings), prepare=prepare)
        else:
            words = train(*settings, "run.directory=new", "budget=1rounds")
            yield done(f"a corpus called {name!r}, trained on", words, prepare=prepare, leaves=(MODEL,))
    for name in ("no [such.txt", "no'such.txt", "no=such,{.txt"):
        yield Case(f"no corpus called {name!r}", train(f"data.train=[{name}]"), ("such",))
    for name in ("a b", "grün", "k=v", "[1]", "it's"):
        model = f"{name}/model/model.safetensors".replace("[1]", "[[]1]")
        yield done(
            f"a run directory called {name!r}", train(f"run.directory={name}", "budget=1rounds"), name, leaves=(model,)
        )

    words, detail = train("run.directory=a,b"), 'run.directory="a,b"'
    yield refused("a run directory called 'a,b', which may be two", words, detail)


def hub_cases() -> Iterator[Case]:
    for what, settings, detail in (
        ("c4", ("data=c4", "data.tokenizer=null"), "data.hub=allenai/c4"),
        ("imdb", ("data=imdb", "data.tokenizer=null", "model=bert_nano"), "data.hub=stanfordnlp/imdb"),
        ("a tokenizer", ("data.tokenizer=nobody/nothing",), "data.tokenizer=nobody/nothing"),
        ("a model", ("model=pretrained", "model.warm_start=nobody/nothing"), "model.warm_start=nobody/nothing"),
    ):
        files = () if what not in ("c4", "imdb") else ("data.train=[train]",)
        words = train(*settings, *files)
        yield refused(f"without a network: {what}", words, detail, "HF_ENDPOINT", by=RANK)
        # An address that never answers: the libraries try for a while.
        silent = {"HF_ENDPOINT": "http://192.0.2.1"}
        yield refused(
            f"a network that swallows everything: {what}", words, detail, environment=silent, by="the network"
        )
    yield refused("check_data without a network", bare("check_data.py", "data=c4"), "HF_ENDPOINT", by=TOOL)
    words = bare("tokenize_corpus.py", "out", "data=c4")
    yield refused("tokenize_corpus without a network", words, "HF_ENDPOINT", by=TOOL)


def corpus_cases() -> Iterator[Case]:
    yield from damaged_corpora()
    yield from odd_files()
    yield from odd_names()
    yield from hub_cases()

"""What is asked wrongly: refused in one line, by the driver where it can know, in a dry run as in training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.rim_case import (
    CORPUS,
    ENDED,
    FAILED,
    HERE,
    MODEL,
    RANK,
    TOOL,
    Case,
    bare,
    done,
    make,
    refused,
    rename,
    train,
    write,
)  # fmt: skip
from chaos.rim_files import unended

ARGPARSE = (("--nope",), ("--nproc-per-node",), ("--nproc-per-node", "two"), ("--jobs", "x"), ("--join-timeout", "1.5"),
            ("--nnodes",), ("--max-restarts", "many"))  # fmt: skip
BY_DRIVER: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--nproc-per-node", "500"), "500"), (("--nproc-per-node", "0"), "--nproc-per-node=0"),
    (("--nproc-per-node", "-1"), "--nproc-per-node=-1"), (("--nproc-per-node", "3"), "ranks"),
    (("--nnodes", "2"), "--rdzv-endpoint"), (("--nnodes", "0"), "--nnodes=0"), (("--nnodes", "2:1"), "--nnodes=2:1"),
    (("--nnodes", "1:2"), "--max-restarts"), (("--nnodes", ""), "--nnodes="),
    (("--max-restarts", "-1"), "--max-restarts=-1"), (("--max-restarts", "1"), "run.unfinished=resume"),
    (("--join-timeout", "0"), "--join-timeout=0"),
    (("--join-timeout", "5"), "--join-timeout"), (("--rdzv-id", "x"), "--rdzv-id"),
    (("--local-addr", "x"), "--local-addr"), (("--rdzv-endpoint", "localhost:1"), "--rdzv-endpoint"),
    (("--jobs", "2"), "--jobs"), (("--redo",), "--redo"),
    (("--slurm",), "SLURM_JOB_ID"), (("--master-port", "99999"), "--master-port=99999"),
    (("--master-port", "-1"), "--master-port=-1"),
    (("inner.lrr=1",), "inner.lr"), (("inner.lr=",), "inner.lr"), (("inner.lr=much",), "inner.lr"), (("=1",), "=1"),
    (("inner",), "inner"), (("inner.lr=nan",), "inner.lr"), (("inner.lr=-1",), "inner.lr"), (("model=giant",), "giant"),
    (("batching.capacity=1e99",), "batching.capacity"), (("evaluation.sequences=0",), "evaluation.sequences"),
    (("seed=99999999999999999999999",), "seed"), (("budget=0rounds",), "budget"),
    (("data.train=[",), "data.train"), (("pool.trainers=0",), "pool.trainers"),
    (("inner.lr=1\x1b[31m",), "inner.lr"), (("inner.lr=[bold]",), "inner.lr"),
    (("run.directory=file",), "run.directory=file"), (("run.directory=file/run",), "run.directory=file/run"),
    (("run.directory=other",), "holds other files"), (("run.directory=run",), "run.directory=run"),
    (("run.root=file",), "run.root=file"),
    (("-m", "seed=1,2", "--dry-run"), "--dry-run"), (("-m", "seed=1"), "-m"), (("-m", "seed=1,-1"), "seed=-1"),
    (("-m", "seed=1,2", "--jobs", "999"), "--jobs=999"), (("-m", "seed=1,2", "--jobs", "0"), "--jobs=0"),
    (("-m", "seed=1,2", "run.directory=x"), "hydra.sweep.dir"), (("-m", "seed=1,2", "hydra.sweep.dir=file/x"), "file"),
    (("-m", "seed=1,2", "hydra/launcher=nothing"), "hydra/launcher"), (("-m", "seed=range(0,0)"), "seed"),
)  # fmt: skip
BY_RANKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("data.train=[nowhere/*.txt]",), "nowhere"), (("data.tokenizer=nowhere.json",), "data.tokenizer=nowhere.json"),
    (("model=pretrained", "model.warm_start=./nowhere"), "model.warm_start=./nowhere"),
    (("model.overrides.num_attention_heads=5",), "num_attention_heads"), (("model.overrides.hidden_size=0",), "model"),
    (("model.overrides.num_hidden_layers=100000",), "100000"), (("model.overrides.hidden_size=10000000",), "10000000"),
    (("+model.overrides.vocab_size=1000000000000",), "vocab_size"), (("model.architecture=nonsense",), "nonsense"),
    (("model.attention=flash_attention_2",), "flash_attention_2"),
    (("data.sequence_length=100000000",), "data.sequence_length"),
    (("batching.request=replay", "batching.replay=nowhere"), "nowhere"), (("run.directory=/proc/run",), "/proc/run"),
)  # fmt: skip
FILES = (write("file", "no directory"), write("other/file", "other"))


def command_lines() -> Iterator[Case]:
    for words in ARGPARSE:
        yield refused(f"argparse: {' '.join(words)}", train(*words), "usage:", "error:", "-")
    for arguments, detail in BY_DRIVER:
        takes_run = arguments == ("run.directory=run",)
        name = f"driver: {' '.join(arguments)!a}"
        yield refused(name, train(*arguments), detail, prepare=FILES, has_run=takes_run)
    for arguments, detail in BY_RANKS:
        name = " ".join(arguments)
        yield refused(f"ranks: {name}", train(*arguments), detail, by=RANK)
        # A shape that no memory holds is planned for, perhaps on another machine; and nothing is made in a dry run.
        codes = (2, ENDED) if arguments[0].endswith("0000") or name.startswith("run") else (2,)
        words = train(*arguments, "--dry-run")
        yield Case(f"ranks: {name} --dry-run", words, (detail,) if codes == (2,) else (), codes=codes, by=TOOL)
    dry = [one for one in BY_DRIVER if one[0][0].startswith(("run.", "--nproc", "--max-restarts"))]
    for arguments, detail in dry:
        name = f"dry run: {' '.join(arguments)}"
        yield refused(
            name, train(*arguments, "--dry-run"), detail, by=TOOL, prepare=FILES, has_run=arguments[0][-3:] == "run"
        )
    yield done("a dry run", train("--dry-run"), "nothing was trained", has_run=True)
    for words in (("--dry-run", "--help"), ("--print-config",), ("--help",)):
        yield done(f"train.py {' '.join(words)}", train(*words))
    read_only = (make("locked"), lambda folder: (folder / "locked").chmod(0o500))
    words = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *train("run.directory=locked/run"))
    yield refused("a folder that cannot be written", words, "locked", prepare=read_only)


def tools() -> Iterator[Case]:
    wrong: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("evaluate.py", (), "run"), ("evaluate.py", ("run", "--sequences", "0"), "--sequences=0"),
        ("evaluate.py", ("corpus.txt",), "corpus.txt"), ("evaluate.py", ("",), ""),
        ("evaluate.py", ("run/model",), "run/model"),
        ("generate.py", ("run",), "text"), ("generate.py", ("run", "x", "--tokens", "-1"), "--tokens"),
        ("generate.py", ("run", "x", "--temperature", "-1"), "--temperature"),
        ("generate.py", ("run", "x", "--temperature", "nan"), "--temperature"),
        ("generate.py", ("run", "x", "--seed", "-1"), ""), ("generate.py", ("run", ""), ""),
        ("report.py", ("corpus.txt",), "corpus.txt"), ("report.py", ("/dev/null",), "/dev/null"),
        ("analyze_gradients.py", ("run", "--batches", "1,x"), "--batches=1,x"),
        ("analyze_gradients.py", ("run", "--sequences", "0"), "--sequences"),
        ("analyze_gradients.py", ("run", "--batches", "99999999"), "--batches"),
        ("analyze_gradients.py", ("run", "--pass", "0"), "--pass"),
        ("analyze_gradients.py", ("run", "--split", "test"), "--split"),
        ("analyze_gradients.py", ("run", "--output", "corpus.txt"), "corpus.txt"),
        ("analyze_gradients.py", ("run", "--nproc-per-node", "0"), "--nproc-per-node=0"),
        ("check_data.py", ("data=text",), "data.train"), ("check_data.py", ("--sequences", "0"), "--sequences=0"),
        ("check_data.py", ("--samples", "-1"), "--samples=-1"), ("check_data.py", ("nonsense",), "nonsense"),
        ("tokenize_corpus.py", (), "out"), ("tokenize_corpus.py", ("out", "--processes", "0"), "--processes=0"),
        ("tokenize_corpus.py", ("out", "--parts", "0"), "--parts=0"),
        ("tokenize_corpus.py", ("out", "data=text"), "data.train"),
        ("tokenize_corpus.py", ("corpus.txt", "data=text", "data.train=[corpus.txt]"), "corpus.txt"),
        ("tokenize_corpus.py", ("out", "data=text", "data.train=[nowhere]"), "nowhere"),
        ("tokenize_corpus.py", ("out", "--train-tokenizer", "-5"), "--train-tokenizer"),
        ("tokenize_corpus.py", ("out", "--train-tokenizer", "10", "data=text", "data.train=[corpus.txt]"),
         "--train-tokenizer"),
        ("tokenize_corpus.py", ("out", "--files", "0"), "--files=0"),
        ("tokenize_corpus.py", ("run", "data=text", "data.train=[corpus.txt]"), "run"),
        ("check.py", ("--nnodes", "2"), "--rdzv-endpoint"), ("check.py", ("--nproc-per-node", "0"), "--nproc-per-node"),
        ("check.py", ("--join-timeout", "0"), "--join-timeout"),
    )  # fmt: skip
    harmless = (("generate.py", ("run", "x", "--seed", "-1")), ("generate.py", ("run", "")),
                ("tokenize_corpus.py", ("run", "data=text", "data.train=[corpus.txt]")))  # fmt: skip
    for script, arguments, detail in wrong:
        codes = (2, ENDED) if (script, arguments) in harmless else (2,)
        yield Case(f"{script} {arguments!a}", bare(script, *arguments), (detail,), codes=codes, by=TOOL, has_run=True)


def sweeps() -> Iterator[Case]:
    """Values are shown as they were typed, and sweep.csv is written."""
    grid: dict[str, Any] = {"leaves": ("grid/sweep.csv",)}
    names = (("a.txt", "b.txt"), (f"{HERE}/a.txt", f"{HERE}/b.txt"), ("grün.txt", "a b.txt"), ("[1].txt", "k=v.txt"),
             ("it's.txt", "[bold].txt"))  # fmt: skip
    for first, second in names:
        files = [Path(name).name for name in (first, second)]
        prepare = tuple(write(file, "".join(f"{number} is not {file}\n" for number in range(2000))) for file in files)
        for value in (f"[{first}],[{second}]", *(["a.txt,b.txt"] if first == "a.txt" else [])):
            words = train("-m", f"data.train={value}", "budget=1rounds", "hydra.sweep.dir=grid")
            yield done(f"sweep over data.train={value}", words, "finished", *files, prepare=prepare, **grid)
    words = train("-m", "seed=1,2", "--jobs", "2", "budget=1rounds", "hydra.sweep.dir=grün [1] =x'")
    yield done("a sweep in a folder with an odd name", words, "finished", leaves=("gr*/sweep.csv",))
    for what, arguments, detail in (
        ("comes to nothing", ("inner.lr=1e-3,1e30",), ("failed", "finished")),
        ("is refused", ("pool.trainers=1,2", "merge=none", "budget=1rounds"), ("failed", "finished")),
        ("has no corpus", ("data.train=[corpus.txt],[nowhere.txt]", "budget=1rounds"), ("failed", "nowhere.txt")),
    ):
        words = train("-m", *arguments, "hydra.sweep.dir=grid")
        yield Case(f"a sweep of which one run {what}", words, detail, codes=(FAILED,), **grid)


def numbers() -> Iterator[Case]:
    for value in ("1e30", "1e300"):
        words = train("inner.lr=" + value, "run.directory=new", "inner.clip_norm=null")
        yield Case(f"inner.lr={value}", words, ("left out",), codes=(FAILED,))
    words = train("inner.lr=1e30", "run.directory=new")
    yield Case("inner.lr=1e30 with clipping", words, ("left out",), codes=(FAILED,))
    words = train("outer.lr=1e30", "run.directory=new")
    yield Case("outer.lr=1e30", words, codes=(ENDED, FAILED))  # norms keep what it makes of the weights finite
    final = train("evaluation.every=null", "run.directory=new")
    yield done("evaluation.every=null", final, "round 1 (", unreported=("round 0",), leaves=(MODEL,))
    moved = (unended, rename(CORPUS, "moved/other.txt"))
    resume = train("run.directory=run", "run.unfinished=resume", "data.train=[moved/other.txt]")
    yield done("the corpus was moved, then resume", resume, "resumes from", has_run=True, prepare=moved)
    evaluate = bare("evaluate.py", "run")
    yield refused(
        "the corpus is gone, then evaluate", evaluate, CORPUS, by=TOOL, has_run=True, prepare=(rename(CORPUS, "x"),)
    )
    changed = write(CORPUS, "other text\n" * 3000)
    for tool, words in (("evaluate", evaluate), ("resume", train("run.directory=run", "run.unfinished=resume"))):
        steps = (changed,) if tool == "evaluate" else (unended, changed)
        yield refused(f"the corpus is another, then {tool}", words, "differ" if tool == "evaluate" else "data",
                      by=TOOL if tool == "evaluate" else RANK, has_run=True, prepare=steps)  # fmt: skip
    again = train("run.directory=run", "run.unfinished=resume")
    yield done("a finished run, resumed", again, "nothing to resume", has_run=True)
    yield done("resume where there is nothing", train("run.directory=new", "run.unfinished=resume"), leaves=(MODEL,))


def mistake_cases() -> Iterator[Case]:
    yield from command_lines()
    yield from tools()
    yield from sweeps()
    yield from numbers()

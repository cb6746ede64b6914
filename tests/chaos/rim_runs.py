"""What befalls a command while it runs: signals, waits in vain, strangers, screens that are full, closed or gone."""

from collections.abc import Iterator
from itertools import product
from signal import SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGSTOP, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

from chaos.rim_case import (
    CORPUS,
    ENDED,
    ENDLESS,
    FAILED,
    GROUP,
    HANG_UP,
    MODEL,
    NOBODY,
    PORT,
    RANK,
    REFUSED,
    STOPPED,
    TREE,
    Act,
    Case,
    bare,
    done,
    refused,
    stopped,
    train,
    write,
)  # fmt: skip
from helpers.commands import foreign_program

CHECKPOINT = "new/checkpoints/*/manifest.json"
NODES = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"localhost:{PORT}", "--local-addr", "localhost")
ENDPOINTS = ("nosuchhost:29500", "nosuchhost.invalid", "a:b", "", ":29500", "localhost:0", "localhost:99999",
             "localhost:-1", "local host:29500", "http://localhost:29500", "[::1", "ü.invalid:29500")  # fmt: skip
STRANGER = "a foreign program on the rendezvous' port"

# --- asked to stop


def stop_cases() -> Iterator[Case]:
    for number, whom in product((SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2), ("the process", GROUP)):
        detail, acts = ("stopping", "run.unfinished=resume"), (Act(number, "round 2 ", whom),)
        yield stopped(f"{number.name} to {whom}", train(*ENDLESS), *detail, leaves=(CHECKPOINT,), acts=acts)
    for number, seconds in product((SIGINT, SIGTERM, SIGHUP), (0.3, 1.0, 2.0, 4.0)):
        act = Act(number, seconds, GROUP)
        yield stopped(f"{number.name} {seconds} s after the start", train(*ENDLESS), acts=(act,))
    again = (Act(SIGINT, "round 2 ", GROUP), Act(SIGINT, "stopping", GROUP))
    yield stopped("a second Ctrl-C", train(*ENDLESS), "stop", acts=again)
    yield stopped("Ctrl-C thrice", train(*ENDLESS), "stop", acts=(*again, Act(SIGINT, 0.05, GROUP)))
    yield stopped("Ctrl-\\", train(*ENDLESS), "stopped at once", acts=(Act(SIGQUIT, "round 2 ", GROUP),))
    nohup = ("nohup", *train("run.directory=new", "budget=40rounds"))
    yield done("nohup and SIGHUP to the group", nohup, leaves=(MODEL,), acts=(Act(SIGHUP, "round 2 ", GROUP),))
    yield stopped("the terminal is closed", train(*ENDLESS), is_terminal=True, leaves=(CHECKPOINT,),
                  acts=(Act(HANG_UP, 12.0),))  # fmt: skip
    yield stopped("Ctrl-C on a terminal", train(*ENDLESS), "run.unfinished=resume", is_terminal=True,
                  leaves=(CHECKPOINT,), acts=(Act(SIGINT, 12.0, GROUP),))  # fmt: skip
    for tool, seconds in product(("evaluate.py", "report.py", "analyze_gradients.py"), (0.5, 2.0)):
        act = Act(SIGINT, seconds, GROUP)
        words = bare(tool, "run")
        yield Case(f"Ctrl-C of {tool} after {seconds} s", words, codes=(ENDED, STOPPED), has_run=True, acts=(act,))
    words = bare("check_data.py", "data=python_stdlib")
    yield Case("Ctrl-C of check_data.py", words, codes=(ENDED, STOPPED), acts=(Act(SIGINT, 2.5, GROUP),))
    words = bare("tokenize_corpus.py", "out", "data=python_stdlib", "--processes", "2")
    yield Case("Ctrl-C of tokenize_corpus.py", words, codes=(ENDED, STOPPED), acts=(Act(SIGINT, 4.0, GROUP),))
    sweep = train("-m", "seed=1,2", "hydra.sweep.dir=grid", "budget=1000000rounds")
    for number, seconds in product((SIGINT, SIGTERM, SIGHUP), (0.0, 1.5, 8.0)):
        act = Act(number, "sweep of", GROUP, seconds)
        detail = ("stopped", "stopping") if seconds else ()
        name = f"{number.name} to a sweep, {seconds} s after its first run has begun"
        yield stopped(name, sweep, *detail, unreported=("failed",), acts=(act,))
    twice = (Act(SIGINT, "sweep of", GROUP, 4.0), Act(SIGINT, 0.3, GROUP))
    yield stopped("Ctrl-C of a sweep, twice", sweep, "stopped", unreported=("failed",), acts=twice)
    freeze = (Act(SIGSTOP, "round 2 ", TREE), Act(SIGCONT, 8.0, TREE))
    words = train("run.directory=new", "budget=60rounds", "cluster.silence_seconds=3")
    yield done("everything stands still for 8 s", words, leaves=(MODEL,), acts=freeze)
    twice = (*freeze, Act(SIGSTOP, 1.0, TREE), Act(SIGCONT, 8.0, TREE))
    yield done("everything stands still twice", words, leaves=(MODEL,), acts=twice)


# --- nodes


def node_cases() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        words = train("--nnodes", "2", "--rdzv-endpoint", endpoint)
        yield refused(f"--rdzv-endpoint {endpoint!r}", words, f"--rdzv-endpoint={endpoint}")
    for tool in ("check.py", "analyze_gradients.py"):
        words = bare(
            tool, *(("run",) if tool != "check.py" else ()), "--nnodes", "2", "--rdzv-endpoint", "nosuchhost:1"
        )
        yield refused(f"{tool} with a host that is not known", words, "nosuchhost", has_run=True)
    for number, whom in product((SIGTERM, SIGINT, SIGHUP, SIGUSR1), ("the process", GROUP)):
        detail, acts = ("waiting at localhost:", "2 nodes", "1 is here"), (Act(number, "1 is here", whom),)
        yield stopped(f"{number.name} to {whom} while it waits for another node", train(*NODES), *detail, acts=acts)
    yield stopped("SIGTERM right after the start of a node", train(*NODES), acts=(Act(SIGTERM, 1.0),))
    yield stopped(
        "SIGTERM to check.py, which waits", bare("check.py", *NODES), "1 is here", acts=(Act(SIGTERM, "1 is here"),)
    )
    words = train(*NODES, "--join-timeout", "8")
    yield Case(
        "another node never comes", words, ("waiting at", "--rdzv-endpoint", "2 nodes within 8 s"), codes=(FAILED,)
    )
    elsewhere = tuple(word.replace("localhost:", "192.0.2.1:") for word in NODES)
    acts = (Act(SIGTERM, "waiting at", later_seconds=5.0),)
    yield stopped("a host that does not answer", train(*elsewhere), "waiting at 192.0.2.1:", acts=acts)
    answers: dict[str, bytes | None] = {"silent": None, "closing": b"", "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n"}
    for what, answer in answers.items():

        def beside(port: int, answer: bytes | None = answer) -> Any:
            return foreign_program(port, answer)

        detail = ("--rdzv-endpoint", "another program listens there")
        yield Case(f"{STRANGER}: {what}", train(*NODES), detail, by=NOBODY, beside=beside, limit_seconds=60)
        words = train("--master-port", PORT)
        yield refused(f"--master-port taken, {what}", words, "--master-port", "choose another", beside=beside)
    small = train(*NODES)
    for what, more, detail in (
        ("settings", ("inner.lr=1e-3",), "inner.lr"), ("seeds", ("seed=1",), "seed"),
        ("models", ("model.overrides.num_hidden_layers=1",), "num_hidden_layers"),
        ("paths of their corpora", ("data.train=[../corpus.txt]",), "data.train"),
    ):  # fmt: skip
        yield refused(f"two nodes with other {what}", small, detail, by=RANK, second=(*small, *more),
                      prepare=(same_corpus,))  # fmt: skip
    yield refused("two nodes with other corpora", small, "corpus", by=RANK, second=small,
                  prepare=(write(f"second/{CORPUS}", "other text\n" * 3000),))  # fmt: skip
    yield refused("one of two nodes without the corpus", small, CORPUS, by=RANK, second=small)
    words = train(*NODES, "run.directory=new", "budget=1rounds")
    yield done("two nodes that agree", words, "ended", second=words, prepare=(same_corpus,), leaves=(MODEL,))
    yield refused("a mistake on one of two nodes", train(*NODES, "batching.request=replay", "batching.replay=nowhere"),
                  "nowhere", by=RANK, second=train(*NODES, "batching.request=replay", "batching.replay=nowhere"),
                  prepare=(same_corpus,))  # fmt: skip


def same_corpus(folder: Any) -> None:
    (folder / "second").mkdir()
    (folder / "second" / CORPUS).write_bytes((folder / CORPUS).read_bytes())


# --- screens

SCREENS = ("> /dev/full", ">&-", "| head -1", "2>&-", "2> /dev/full", ">&- 2>&-", "> /dev/full 2> /dev/full", "| true",
           "< /dev/null >&- <&-")  # fmt: skip


def screen_cases() -> Iterator[Case]:
    """A run continues without its screen; a tool whose output is lost says so, and ends with 1."""
    quiet: dict[str, Any] = {"silence_seconds": 60.0}
    for screen in SCREENS:
        yield done(
            f"train {screen}", train("run.directory=new"), redirection=screen, leaves=(MODEL, "new/run.json"), **quiet
        )
    tools = {
        "evaluate": bare("evaluate.py", "run", "--sequences", "8"), "report": bare("report.py", "run"),
        "check_data": bare("check_data.py", "data=text", f"data.train=[{CORPUS}]"),
        "--print-config": train("--print-config"), "--dry-run": train("--dry-run"),
        "generate": bare("generate.py", "run", "1", "--tokens", "3"), "--help": bare("train.py", "--help"),
        "analyze_gradients": bare("analyze_gradients.py", "run", "--sequences", "8", "--batches", "1,2"),
    }  # fmt: skip
    for tool, words in tools.items():
        more = {"has_run": True, **quiet}
        codes = (FAILED, ENDED) if tool in ("--help", "analyze_gradients") else (FAILED,)
        detail = () if tool in ("--help", "analyze_gradients") else ("error: standard output cannot be written",)
        yield Case(f"{tool} > /dev/full", words, detail, codes=codes, redirection="> /dev/full", **more)
        yield Case(f"{tool} | head -1", words, codes=(ENDED,), redirection="| head -1", **more)
        yield Case(f"{tool} >&-", words, codes=(ENDED, FAILED), redirection=">&-", **more)
    sweep = train("-m", "seed=1,2", "hydra.sweep.dir=grid", "budget=1rounds")
    for screen in ("> /dev/full", ">&- 2>&-"):
        yield Case(f"a sweep {screen}", sweep, codes=(ENDED, FAILED), redirection=screen, **quiet,
                   leaves=("grid/sweep.csv", "grid/seed=2/model/model.safetensors"))  # fmt: skip
    yield Case("a refusal with stderr closed", train("seed=-1"), codes=(REFUSED,), redirection="2>&-")
    looks: dict[str, dict[str, str]] = {
        "LANG=C": {"LANG": "C", "LC_ALL": "C"},
        "ascii": {"PYTHONIOENCODING": "ascii"}, "latin-1": {"PYTHONIOENCODING": "latin-1:strict"},
        "TERM=dumb": {"TERM": "dumb"}, "20 columns": {"COLUMNS": "20"}, "1 column": {"COLUMNS": "1"},
        "no TERM": {"TERM": ""},
    }  # fmt: skip
    for number, (look, environment) in enumerate(looks.items()):
        for is_terminal in (False, True):
            yield done(f"train with {look}{', terminal' * is_terminal}", train("run.directory=grün", "budget=1rounds"),
                       environment=environment, is_terminal=is_terminal, leaves=("gr*n/model",))  # fmt: skip
        names = list(tools)[:4]
        for tool in (names[number % 4], names[(number + 1) % 4]):
            yield done(f"{tool} with {look}", tools[tool], has_run=True, environment=environment)


def run_cases() -> Iterator[Case]:
    yield from stop_cases()
    yield from node_cases()
    yield from screen_cases()

"""Make the runs of one question, or of all: python experiments/run.py second_machine."""

import argparse
from pathlib import Path

from cases import idle_cores
from questions import QUESTIONS
from runs import make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/experiments"), help="where runs are, and resume")
    parser.add_argument("--cores", type=int, default=idle_cores(), help="ranks that train at once")
    parser.add_argument("--wikitext", type=Path, metavar="FILE", help="WikiText-2's training text, for other_corpora")
    options = parser.parse_args()
    for question in options.questions:
        if question not in QUESTIONS:
            parser.error(f"{question} is none of {', '.join(QUESTIONS)}")
    for question in options.questions or QUESTIONS:
        make(QUESTIONS[question](options.wikitext), options.folder.resolve(), options.cores)


if __name__ == "__main__":
    main()

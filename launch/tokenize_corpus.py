"""Tokenize a corpus into token files: `python launch/tokenize_corpus.py OUT key=value ...`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.tools.tokenize")

"""Tokenize a corpus into token files: `python launch/tokenize_corpus.py OUT key=value ...`."""

from adloco_dist.tools.tokenize import main

if __name__ == "__main__":
    main()

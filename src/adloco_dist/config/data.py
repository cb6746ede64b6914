"""The data that a run is trained on."""

from dataclasses import dataclass, field
from typing import Annotated

from adloco_dist.config.choices import Corpus, Damaged, Packing, Shards
from adloco_dist.config.errors import require
from adloco_dist.config.marks import Range, ReadWhen

OF_ROWS = (Corpus.json, Corpus.parquet, Corpus.csv, Corpus.hub)
"""Corpora whose files hold many documents each, in columns."""
FROM_FILES = "data.corpus!=python_stdlib,python_packages"
WITH_ROWS = "data.corpus=json,parquet,csv,hub"
FROM_READABLE = "data.corpus=text,json,parquet,csv,hub"
UNLABELLED_TEXT = ("data.corpus!=tokens,python_packages", "data.label_column=null")
IF_LABELLED = (ReadWhen("data.label_column!=null"), ReadWhen("data.corpus=python_packages"))


@dataclass
class DataSettings:
    """The data that a run is trained on."""

    corpus: Corpus = Corpus.python_stdlib
    """python_stdlib: the sources of the running Python. python_packages: pieces of them, and which package each is of.
    text: every file a document. json (lines), parquet, csv: every row a document; also compressed. hub: a data set of
    the Hugging Face hub. tokens: .npy files of token ids, or folders that launch/tokenize_corpus.py wrote."""
    hub: Annotated[str | None, ReadWhen("data.corpus=hub")] = None
    """The data set: `NAME`, `NAME:SUBSET` (for C4 the language), `NAME@REVISION` (a branch, tag or commit; else it is
    the newest) or `NAME:SUBSET@REVISION`. NAME may be a folder that holds a copy of it."""
    train: Annotated[list[str], ReadWhen(FROM_FILES)] = field(default_factory=list)
    """Files or globs to train on; of a hub data set, its splits."""
    validation: Annotated[list[str], ReadWhen(FROM_FILES)] = field(default_factory=list)
    """The same for validation. Empty: `validation_fraction` of `train` is held out."""
    validation_fraction: Annotated[float, Range("in (0, 1)"), ReadWhen("data.validation=[]")] = 0.05
    """Share of the documents (of the tail, where there is one) that is held out."""
    sample: Annotated[int | None, Range(">= 1"), ReadWhen("data.corpus!=tokens", "data.streaming=false")] = None
    """Maximum number of documents that are read of `train` (its first), before any are held out. null: all."""
    validation_documents: Annotated[int | None, Range(">= 1"), ReadWhen(WITH_ROWS, "data.validation!=[]")] = None
    """Maximum number of documents that are read of `validation`. null: all."""
    text_column: Annotated[str, ReadWhen(WITH_ROWS)] = "text"
    """Name of the column that holds the text."""
    label_column: Annotated[str | None, ReadWhen(WITH_ROWS)] = None
    """Name of the column that holds what a classifier predicts, numbers from 0 on or words. null: the model is causal,
    except with python_packages, which has labels of its own."""
    num_labels: Annotated[int | None, Range(">= 2"), *IF_LABELLED] = None
    """Number of classes. null: as many as the training documents have."""
    tokenizer: Annotated[str | None, ReadWhen("data.corpus!=tokens")] = None
    """A tokenizer: a folder, a tokenizer.json, or a model of the hub. null: bytes."""
    sequence_length: Annotated[int, Range(">= 1 token")] = 128
    """Tokens per sequence that are predicted (a stored sequence is one longer), or that a classifier reads."""
    packing: Annotated[Packing, ReadWhen(*UNLABELLED_TEXT)] = Packing.packed
    """packed: documents one after the other, cut into equal sequences. document: one for each sequence, cut off at its
    length and padded; padding never counts."""
    shards: Shards = Shards.disjoint
    """disjoint: every trainer reads a part of its own. shared: every trainer reads all, each in another order."""
    streaming: Annotated[bool, ReadWhen(WITH_ROWS)] = False
    """Read rows while training, in the order of the files, tokenised in the background: nothing is held or downloaded
    as a whole. false: everything is read at the start, and sequences come in a random order."""
    damaged: Annotated[Damaged, ReadWhen(FROM_READABLE)] = Damaged.refuse
    """What is done with rows that cannot be read or whose text or label is null or missing, with a file that cannot be
    read to its end, and with a text file that is not UTF-8. skip: they are left out, and so is what comes after the
    last readable row of a file; all of it is counted and reported."""

    @property
    def is_labelled(self) -> bool:
        """Whether a classifier is trained."""
        return self.label_column is not None or self.corpus is Corpus.python_packages

    def __post_init__(self) -> None:
        labels, is_hub = self.num_labels, self.corpus is Corpus.hub
        if self.corpus in (Corpus.python_stdlib, Corpus.python_packages):  # which every machine has
            rule = f"has no effect with data.corpus={self.corpus.name}; use data=text"
            require(not self.train, "data.train", self.train, rule)
            require(not self.validation, "data.validation", self.validation, rule)
        else:
            needed = "names of splits" if is_hub else "files or globs"
            require(bool(self.train), "data.train", self.train, f"data.corpus={self.corpus.name} needs {needed}")
        require(bool(self.hub) == is_hub, "data.hub", self.hub, "names a data set with data.corpus=hub, and only there")
        if self.corpus is Corpus.tokens:
            rule = "has no effect on token files, which are tokenised already; leave it out"
            require(self.tokenizer is None, "data.tokenizer", self.tokenizer, rule)
            rule = "needs documents; token files are packed"
            require(self.packing is Packing.packed, "data.packing", self.packing, rule)
        rule = "token files have no documents any more, and streams are read as far as the budget goes; leave it out"
        reads_all = self.corpus is not Corpus.tokens and not self.streaming
        require(self.sample is None or reads_all, "data.sample", self.sample, rule)
        rows, rule = self.corpus in OF_ROWS, "needs rows: data.corpus of json, parquet, csv or hub"
        require(rows or self.label_column is None, "data.label_column", self.label_column, rule)
        require(rows or not self.streaming, "data.streaming", self.streaming, rule)
        may_be_damaged = rows or self.corpus is Corpus.text
        is_default = self.damaged is Damaged.refuse
        require(may_be_damaged or is_default, "data.damaged", self.damaged, f"{rule}, or files of text")
        require(labels is None or self.is_labelled, "data.num_labels", labels, "needs labels: set data.label_column")
        if self.streaming:
            rule = "a stream cannot hold documents back; name files or splits"
            require(bool(self.validation), "data.validation", self.validation, rule)
            rule = "a stream does not know its labels beforehand; say how many there are"
            require(labels is not None or not self.is_labelled, "data.num_labels", labels, rule)

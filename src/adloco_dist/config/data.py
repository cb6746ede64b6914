"""The data that a run is trained on."""

from dataclasses import dataclass, field
from typing import Annotated

from adloco_dist.config.choices import Corpus, Damaged, Nulls, Packing, Shards
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ReadWhen

EMBEDDED = (Corpus.python_stdlib, Corpus.python_packages)
"""Corpora that every machine has."""
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
    """Name of the data set, or a folder that holds a copy of it."""
    subset: Annotated[str | None, ReadWhen("data.corpus=hub")] = None
    """Which part of the data set: for C4 the language. null: the only one."""
    revision: Annotated[str | None, ReadWhen("data.corpus=hub")] = None
    """Branch, tag or commit of the data set on the hub. null: the newest."""
    train: Annotated[list[str], ReadWhen(FROM_FILES)] = field(default_factory=list)
    """Files or globs to train on; of a hub data set, its splits."""
    validation: Annotated[list[str], ReadWhen(FROM_FILES)] = field(default_factory=list)
    """The same for validation. Empty: `validation_fraction` of `train` is held out."""
    validation_fraction: Annotated[float, ReadWhen("data.validation=[]")] = 0.05
    """Share of the documents (of the tail, where there is one) that is held out, in (0, 1)."""
    sample: Annotated[int | None, ReadWhen("data.corpus!=tokens", "data.streaming=false")] = None
    """Maximum number of documents that are read of `train` (its first), before any are held out. null: all."""
    validation_documents: Annotated[int | None, ReadWhen(WITH_ROWS, "data.validation!=[]")] = None
    """Maximum number of documents that are read of `validation`. null: all."""
    text_column: Annotated[str, ReadWhen(WITH_ROWS)] = "text"
    """Name of the column that holds the text."""
    label_column: Annotated[str | None, ReadWhen(WITH_ROWS)] = None
    """Name of the column that holds what a classifier predicts, numbers from 0 on or words. null: the model is causal,
    except with python_packages, which has labels of its own."""
    num_labels: Annotated[int | None, *IF_LABELLED] = None
    """Number of classes. null: as many as the training documents have."""
    tokenizer: Annotated[str | None, ReadWhen("data.corpus!=tokens")] = None
    """A tokenizer: a folder, a tokenizer.json, or a model of the hub. null: bytes."""
    vocab_size: Annotated[int | None, ReadWhen("data.corpus=tokens")] = None
    """Vocabulary of plain token files. null: largest id + 1."""
    sequence_length: int = 128
    """Tokens per sequence that are predicted (a stored sequence is one longer); for a classifier, tokens that
    are read."""
    packing: Annotated[Packing, ReadWhen(*UNLABELLED_TEXT)] = Packing.packed
    """packed: documents one after the other, cut into equal sequences. document: one for each sequence, cut off at its
    length and padded; padding never counts."""
    shards: Shards = Shards.disjoint
    """disjoint: every trainer reads a part of its own. shared: every trainer reads all, each in another order."""
    streaming: Annotated[bool, ReadWhen(WITH_ROWS)] = False
    """Read rows while training, in the order of the files, tokenised in the background: nothing is held or downloaded
    as a whole. false: everything is read at the start, and sequences come in a random order."""
    damaged: Annotated[Damaged, ReadWhen(FROM_READABLE)] = Damaged.refuse
    """What is done with rows that cannot be read, with a file that cannot be read to its end, and with a text file that
    is no UTF-8. skip: they are left out, and what comes after a file's last readable row; counted and reported."""
    nulls: Annotated[Nulls, ReadWhen(WITH_ROWS)] = Nulls.refuse
    """What is done with rows whose text or label is null or missing. skip: they are left out, counted and reported."""

    @property
    def is_labelled(self) -> bool:
        """Whether a classifier is trained."""
        return self.label_column is not None or self.corpus is Corpus.python_packages

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise SettingsError.of("data.sequence_length", self.sequence_length, "must be >= 1 token")
        fraction = self.validation_fraction
        if not 0 < fraction < 1:
            raise SettingsError.of("data.validation_fraction", fraction, "must lie between 0 and 1, both excluded")
        self._check_files()
        for name in ("vocab_size", "num_labels"):
            value = getattr(self, name)
            if value is not None and not value >= 2:
                raise SettingsError.of(f"data.{name}", value, "must be >= 2, or null")
        for name in ("sample", "validation_documents"):
            maximum = getattr(self, name)
            if maximum is not None and maximum < 1:
                raise SettingsError.of(f"data.{name}", maximum, "must be >= 1, or null for all")
        is_tokens, rows = self.corpus is Corpus.tokens, self.corpus in OF_ROWS
        rule = "is for data.corpus=tokens; text has the vocabulary of its tokenizer"
        if self.vocab_size is not None and not is_tokens:
            raise SettingsError.of("data.vocab_size", self.vocab_size, rule)
        rule = "has no effect on token files, which are tokenised already; leave it out"
        if self.tokenizer is not None and is_tokens:
            raise SettingsError.of("data.tokenizer", self.tokenizer, rule)
        rule = "needs documents; token files are packed"
        if self.packing is not Packing.packed and is_tokens:
            raise SettingsError.of("data.packing", self.packing, rule)
        rule = "token files have no documents any more, and streams are read as far as the budget goes; leave it out"
        if self.sample is not None and (is_tokens or self.streaming):
            raise SettingsError.of("data.sample", self.sample, rule)
        rule = "needs rows: data.corpus of json, parquet, csv or hub"
        if self.label_column is not None and not rows:
            raise SettingsError.of("data.label_column", self.label_column, rule)
        if self.streaming and not rows:
            raise SettingsError.of("data.streaming", self.streaming, rule)
        if self.damaged is not Damaged.refuse and not rows and self.corpus is not Corpus.text:
            raise SettingsError.of("data.damaged", self.damaged, f"{rule}, or files of text")
        if self.nulls is not Nulls.refuse and not rows:
            raise SettingsError.of("data.nulls", self.nulls, rule)
        rule = "needs labels: set data.label_column"
        if self.num_labels is not None and not self.is_labelled:
            raise SettingsError.of("data.num_labels", self.num_labels, rule)
        rule = "a stream cannot hold documents back; name files or splits"
        if not self.validation and self.streaming:
            raise SettingsError.of("data.validation", self.validation, rule)
        rule = "a stream does not know its labels beforehand; say how many there are"
        known = not (self.streaming and self.is_labelled) or self.num_labels is not None
        if not known:
            raise SettingsError.of("data.num_labels", self.num_labels, rule)

    def _check_files(self) -> None:
        if self.corpus in EMBEDDED:
            for name in ("train", "validation"):
                files, corpus = getattr(self, name), self.corpus.name
                if files:
                    raise SettingsError.of(
                        f"data.{name}", files, f"has no effect with data.corpus={corpus}; use data=text"
                    )
        else:
            what = "names of splits" if self.corpus is Corpus.hub else "files or globs"
            if not self.train:
                raise SettingsError.of("data.train", self.train, f"data.corpus={self.corpus.name} needs {what}")
        is_hub = self.corpus is Corpus.hub
        if bool(self.hub) != is_hub:
            raise SettingsError.of("data.hub", self.hub, "names a data set with data.corpus=hub, and only there")
        for name in ("subset", "revision"):
            value = getattr(self, name)
            if value is not None and not is_hub:
                raise SettingsError.of(f"data.{name}", value, "has no effect without data.corpus=hub")

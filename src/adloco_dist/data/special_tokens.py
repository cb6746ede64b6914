"""What a tokenizer does beside encoding text: where documents end, what its template adds, what it lacks."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def vocabulary_size(backend: Tokenizer) -> int:
    """Largest id + 1: ids may have gaps."""
    return max(backend.get_vocab().values(), default=0) + 1


def single_id(token: object) -> int | None:
    """The id of a special token; transformers' types allow several."""
    return token if isinstance(token, int) else None


def end_of(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """What ends a document: the last token of the template, where it puts one there, or the end token."""
    _, suffix = template_of(tokenizer.backend_tokenizer)
    return suffix[-1] if suffix else single_id(tokenizer.eos_token_id)


def template_of(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after every document."""
    by_id = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    for text in ("a", *(token for token, _ in by_id)):
        try:
            inner = backend.encode(text, add_special_tokens=False)
        except Exception:  # it has no token for this text
            continue
        if inner.ids:
            length, whole = len(inner.ids), backend.post_process(inner)
            start = whole.special_tokens_mask.index(0)
            return whole.ids[:start], whole.ids[start + length :]
    return [], []


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The ids of control tokens, which a text may spell out."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def lacks_of(tokenizer: PreTrainedTokenizerFast, is_file: bool) -> list[str]:
    """What a user should know that a tokenizer, of a folder or a tokenizer.json alone, lacks."""
    lacks, backend = [], tokenizer.backend_tokenizer
    num_tokens, size = backend.get_vocab_size(), vocabulary_size(backend)
    if end_of(tokenizer) is None:
        detail = "has no end token: nothing marks where a document ends, and generated text does not end by itself"
        where = "the folder of this tokenizer.json" if is_file else "one"
        lacks.append(f"{detail}; name {where} that has eos_token in its tokenizer_config.json")
    if size > num_tokens:
        detail = f"has ids up to {size - 1:,} for {num_tokens:,} tokens"
        lacks.append(f"{detail}: the model has {size:,} ids, {size - num_tokens:,} of which nothing is trained for")
    if _loses_characters(backend):
        detail = "has no unknown token, and not every byte in its vocabulary"
        lacks.append(f"{detail}: characters that it does not know are left out of the text")
    return lacks


def _loses_characters(backend: Tokenizer) -> bool:
    """Whether characters that are in no token are left out: other models than BPE fail there."""
    model, vocabulary = backend.model, backend.get_vocab()
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return False
    if model.byte_fallback:
        return "<0x00>" not in vocabulary
    is_of_bytes = "ByteLevel" in str(backend.pre_tokenizer)
    return not is_of_bytes or not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())

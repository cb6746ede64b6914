"""What comes from the Hugging Face hub, or from a folder in its place: models, tokenizers, data sets."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from adloco_dist.config import SettingsError
from adloco_dist.terminal import reason


@contextmanager
def fetching(setting: str, name: str, remedy: str) -> Iterator[None]:
    """Around everything that may ask the hub: what goes wrong is told once, in one line.

    Args:
        setting: which names it.
        remedy: what to set where it cannot be read.

    Raises:
        SettingsError: it cannot be read. transformers, datasets and what they stand on have exceptions of many kinds.
    """
    for library in ("huggingface_hub", "datasets"):  # else every attempt is told
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        rule = f"cannot be read ({reason(error)}); {remedy}, or set HF_ENDPOINT to a mirror of the hub"
        raise SettingsError(f"{setting}={name}: {rule}") from error

"""What comes from the Hugging Face hub, or from a folder in its place: models, tokenizers, data sets."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from adloco_dist.addresses import out_of_reach
from adloco_dist.config import SettingsError
from adloco_dist.config.paths import exists_here
from adloco_dist.terminal import reason, tell_error

OFFLINE = "HF_HUB_OFFLINE"
"""In the environment of huggingface_hub, transformers and datasets."""
READ_WHEN_IMPORTED = ("huggingface_hub.constants", "datasets.config")
"""Where they keep it from then on."""


def prefer_cache_without_hub(*names: str | None) -> None:
    """Where the hub is out of reach, let its libraries look into their cache alone: they would try for a minute.

    Args:
        names: what settings name; nothing is done where all of them are on this machine.
    """
    wanted = [name for name in names if name and not exists_here(name)]
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if not wanted or OFFLINE in os.environ or not hub.hostname or (getproxies() and not proxy_bypass(hub.hostname)):
        return
    try:
        port = hub.port or (443 if hub.scheme == "https" else 80)
    except ValueError:  # which the libraries tell
        return
    if why := out_of_reach(hub.hostname, port):
        os.environ[OFFLINE] = "1"
        for module in filter(None, map(sys.modules.get, READ_WHEN_IMPORTED)):
            module.HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
        tell_error(f"note: {hub.hostname} is out of reach ({why}): only what is in its cache here can be used")


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

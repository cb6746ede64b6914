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
from adloco_dist.terminal import report_error
from adloco_dist.text import reason

OFFLINE = "HF_HUB_OFFLINE"
"""The environment variable that keeps huggingface_hub, transformers and datasets offline."""
READ_WHEN_IMPORTED = ("huggingface_hub.constants", "datasets.config")
"""Modules that read it once, when they are imported."""


def prefer_cache_without_hub(*names: str | None) -> None:
    """Let the hub's libraries look into their cache alone where it is out of reach: they would try for a minute.

    Args:
        names: what settings name; nothing is done where all of them are on this machine.
    """
    wanted = [name for name in names if name and not exists_here(name)]
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if not wanted or OFFLINE in os.environ or not hub.hostname or (getproxies() and not proxy_bypass(hub.hostname)):
        return
    try:
        port = hub.port or (443 if hub.scheme == "https" else 80)
    except ValueError:  # which the libraries report
        return
    if why := out_of_reach(hub.hostname, port):
        os.environ[OFFLINE] = "1"
        for module in filter(None, map(sys.modules.get, READ_WHEN_IMPORTED)):
            module.HF_HUB_OFFLINE = True  # pyright: ignore[reportAttributeAccessIssue]
        report_error(f"note: {hub.hostname} is out of reach ({why}): only what is in its cache here can be used")


@contextmanager
def fetching(setting: str, name: str, remedy: str) -> Iterator[None]:
    """Report what goes wrong while the block asks the hub, once and in one line.

    Args:
        setting: the one that names what is read.
        remedy: what to set where it cannot be read.

    Raises:
        SettingsError: it cannot be read. transformers, datasets and what they stand on have exceptions of many kinds.
    """
    for library in ("huggingface_hub", "datasets"):  # else every attempt is logged
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        rule = f"cannot be read ({reason(error)}); {remedy}, or set HF_ENDPOINT to a mirror of the hub"
        raise SettingsError(f"{setting}={name}: {rule}") from error

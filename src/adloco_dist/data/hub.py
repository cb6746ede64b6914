"""What comes from the Hugging Face hub, or from a folder in its place: models, tokenizers, data sets."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from adloco_dist.addresses import out_of_reach
from adloco_dist.config.errors import refused
from adloco_dist.config.paths import exists_here
from adloco_dist.terminal import report_error

OFFLINE = "HF_HUB_OFFLINE"
"""The environment variable that keeps huggingface_hub, transformers and datasets offline."""
READ_WHEN_IMPORTED = ("huggingface_hub.constants", "datasets.config")
"""Modules that read it once, when they are imported."""


def prefer_cache_without_hub(*names: str | None) -> None:
    """Let the hub's libraries use only their cache where the hub is out of reach: they would try for a minute. Nothing
    is done where everything that settings name, perhaps with a subset and a revision, is on this machine."""
    wanted = [name for name in names if name and not exists_here(split_subset(name)[0])]
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


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `NAME@REVISION`, unless it exists on this machine. A revision has no colon, so that a folder with an @ in
    its name may be followed by a subset."""
    split = None if exists_here(name) else re.fullmatch(r"(.+?)@([^:@]+)", name)
    return (split[1], split[2]) if split else (name, None)


def split_subset(name: str) -> tuple[str, str | None, str | None]:
    """Split `NAME:SUBSET@REVISION` of a data set, unless it exists on this machine."""
    rest, revision = split_revision(name)
    split = None if exists_here(rest) else re.fullmatch(r"(.+):([^:/]+)", rest)
    return (split[1], split[2], revision) if split else (rest, None, revision)


@contextmanager
def fetching(setting: str, name: str, remedy: str) -> Iterator[None]:
    """Turn whatever the hub's libraries raise in the block, while they fetch what a setting names, into one
    SettingsError that says what to do."""
    for library in ("huggingface_hub", "datasets"):  # else every attempt is logged
        logging.getLogger(library).setLevel(logging.ERROR)
    with refused(f"{setting}={name}: cannot be read", f"{remedy}, or set HF_ENDPOINT to a mirror of the hub"):
        yield

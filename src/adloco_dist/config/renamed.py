"""Settings whose names have changed: for one release, the old names are refused with the new ones."""

from adloco_dist.config.errors import SettingsError

RENAMED = {
    "inner.warmup_tokens": "inner.warmup_fraction",
    "batching.smoothing": "batching.span",
    "batching.least_batch": "batching.min_batch",
    "batching.largest_batch": "batching.max_batch",
    "outer.spoilt_rounds": "outer.nonfinite_rounds",
    "merge.freed": "merge.released_workers",
    "run.unfinished=set_aside": "run.unfinished=archive",
}
"""New names by old ones, of settings and of their choices."""


def refuse_renamed(key: str, value: object) -> None:
    """Refuse a setting, or a choice of one, under the name that it had.

    Raises:
        SettingsError: it has a new name.
    """
    if new := RENAMED.get(key):
        raise SettingsError.of(key, value, f"has been renamed; set {new}")
    if new := RENAMED.get(f"{key}={value}"):
        raise SettingsError.of(key, value, f"has been renamed; set {new}")

"""A sink of records for tests and benchmarks, and files of JSON with other values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco_dist.messages import Json, encode
from adloco_dist.run.journal import Sink
from adloco_dist.run.rows import TrainerRow


@dataclass
class KeptRecords(Sink):
    """Keeps the rows that rank 0 would write, as their file would have them."""

    records: list[Json]

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Keep one round's rows."""
        self.records.extend(encode(row) for row in rows)

    def close(self, result: Json | None) -> None:
        """Nothing is left to do."""


def edited_json(content: bytes, fields: Mapping[str, Any]) -> bytes:
    """JSON with other values, by their paths with two underscores between; `KeyError`: the value is left out."""
    value = json.loads(content)
    for path, new in fields.items():
        holder, (*above, key) = value, path.split("__")
        for name in above:
            holder = holder[name]
        if new is KeyError:
            del holder[key]
        else:
            holder[key] = new
    return json.dumps(value).encode()

"""How pseudo-gradients travel between the ranks of a trainer: in how many bits, in how many parts, and when."""

from dataclasses import dataclass
from typing import Annotated

from adloco_dist.config.choices import WireFormat
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import ReadWhen


@dataclass
class WireSettings:
    """How pseudo-gradients travel between the ranks of a trainer."""

    format: WireFormat = WireFormat.fp32
    """fp32: as they are (fp64 with precision=fp64). bf16, int8, int4: rounded to 16, 8.125 or 4.125 bits, summed in
    fp32. sparse: the largest elements alone, in 2 bits each (SparseLoCo, 2508.15706)."""
    error_feedback: Annotated[bool | None, ReadWhen("wire.format!=fp32")] = None
    """Whether what compression takes away is added to the next pseudo-gradient; takes a vector of the model's size for
    each trainer of a rank. null: sparse does."""
    fraction: Annotated[float, ReadWhen("wire.format=sparse")] = 0.015625
    """Share of the elements that sparse sends, in (0, 1]."""
    residual_decay: Annotated[float, ReadWhen("wire.format=sparse", "wire.error_feedback!=false")] = 0.95
    """What sparse multiplies by what it has not sent, before it adds the next pseudo-gradient; in [0, 1]."""
    fragments: int = 1
    """P: parts of a model that are averaged at different times of a round (Streaming DiLoCo, 2501.18512)."""
    delay_updates: int | None = 0
    """tau: updates that are computed while an average travels, before its outer step reaches the workers. 0: workers
    wait for it. null: one or more, as the measured link needs (with algorithm.round=link)."""

    @property
    def keeps_residual(self) -> bool:
        """Whether there is error feedback."""
        return self.format is WireFormat.sparse if self.error_feedback is None else self.error_feedback

    @property
    def is_delayed(self) -> bool:
        """Whether updates are computed while averages travel."""
        return self.delay_updates is None or self.delay_updates > 0

    @property
    def is_streaming(self) -> bool:
        """Whether workers do not all stand at the anchor when a round begins."""
        return self.fragments > 1 or self.is_delayed

    @property
    def is_plain(self) -> bool:
        """Whether whole pseudo-gradients travel as they are, and workers wait for them."""
        return self.format is WireFormat.fp32 and not self.is_streaming

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise SettingsError.of("wire.fraction", self.fraction, "must be in (0, 1]")
        if not 0 <= self.residual_decay <= 1:
            raise SettingsError.of("wire.residual_decay", self.residual_decay, "must be in [0, 1]")
        if self.fragments < 1:
            raise SettingsError.of("wire.fragments", self.fragments, "must be >= 1")
        if self.delay_updates is not None and self.delay_updates < 0:
            raise SettingsError.of("wire.delay_updates", self.delay_updates, "must be >= 0, or null")
        if self.format is WireFormat.fp32 and self.error_feedback:
            rule = "wire.format=fp32 takes nothing away; leave it out, or choose another format"
            raise SettingsError.of("wire.error_feedback", self.error_feedback, rule)

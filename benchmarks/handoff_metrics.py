"""What a cluster's own metrics say about its hand-offs: read before and after, nothing is measured twice."""

from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families

# A histogram's sum each: what one hand-off adds is the difference of two readings.
_SUMS = {
    "seconds": "tandem_kv_transfer_seconds",
    "nbytes": "tandem_kv_transfer_bytes",
    "segments": "tandem_kv_transfer_segments",
}


@dataclass(frozen=True, slots=True)
class Transfers:
    """All hand-offs that ended so far, over all workers."""

    count: float
    seconds: float  # of copying
    nbytes: float
    segments: float  # runs of consecutive blocks, each one copy

    @classmethod
    def read(cls, text: str) -> "Transfers":
        """Out of a scrape of the gateway.

        Raises:
            ValueError: no worker in it says anything of hand-offs.
        """
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        try:
            return cls(
                sums[f"{_SUMS['seconds']}_count"], **{field: sums[f"{name}_sum"] for field, name in _SUMS.items()}
            )
        except KeyError as error:
            raise ValueError(f"no worker was scraped: there is no {error.args[0]}") from error

    def since(self, before: "Transfers") -> "Transfers":
        """What came after an earlier reading."""
        return Transfers(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(Transfers)))

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

"""Joins the metrics of all replicas into one text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged(texts: Sequence[tuple[str, str]]) -> bytes:
    """The metrics of all replicas, each series with a label `replica` more.

    Args:
        texts: The name of each replica, and its metrics as Prometheus reads them.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            family.samples += [sample._replace(labels={"replica": replica, **sample.labels}) for sample in found.samples]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(families))
    return generate_latest(registry)


class _Found(Collector):
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())

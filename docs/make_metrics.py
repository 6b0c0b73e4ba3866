"""Write docs/reference/metrics.md from what a server tells Prometheus.

    python docs/make_metrics.py

Names, kinds and meanings are those of the lines HELP and TYPE, so the page cannot say anything else than the server does.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from outrider import LLM
from outrider.engine.thread import Health
from outrider.server.metrics import EngineState, ServerMetrics

PAGE = Path(__file__).parent / "reference" / "metrics.md"
INTRODUCTION = """# Metrics

`GET /metrics` of the server tells these to Prometheus, each with the label `model_name`. Those that mean
the same as in vLLM have vLLM's names; some have a further label, `method`. Those that begin with `process_` describe the
process, in the names of Prometheus' clients. `docs/make_metrics.py` writes this page from the code, and a test compares it
with what a server tells.

| metric | kind | means |
|---|---|---|
"""


def page(told: str) -> str:
    """The page for what a server tells."""
    families = list(text_string_to_metric_families(told))
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in families]
    rows = [
        f"| `{name}` | {family.type} | {family.documentation} |\n" for name, family in zip(names, families, strict=True)
    ]
    return INTRODUCTION + "".join(rows)


def told() -> str:
    """What a server tells that has written nothing."""
    engine = LLM(kv_cache_tokens=1024).engine
    return ServerMetrics("").text(EngineState.of(engine, Health()), {}).decode()


if __name__ == "__main__":
    PAGE.write_text(page(told()), "utf-8")

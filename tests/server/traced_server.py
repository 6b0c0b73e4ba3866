"""The command with the SDK of OpenTelemetry, whose spans are kept in memory and written to a file as they end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.cli.main import main


class Kept(InMemorySpanExporter):
    """Spans in memory, and each as a line of JSON for the test, which is another process."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        found = super().export(spans)
        with Path(os.environ["SPANS"]).open("a", encoding="utf-8") as file:
            file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        return found


if __name__ == "__main__":
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Kept()))
    trace.set_tracer_provider(provider)
    main()

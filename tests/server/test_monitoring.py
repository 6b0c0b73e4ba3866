"""The dashboard and the compose file among the examples fit what a real server tells Prometheus."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import Server, running

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "outrider.json").read_text("utf-8"))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Started with the options of the compose file, and with a key, so that there is a tenant.

    One answer names its method: the engine's own choice may be not to draft, and then no member has drafted anything.
    """
    with running(*COMPOSE["services"]["outrider"]["command"], OUTRIDER_API_KEYS="team:secret") as server:
        for stream, method in ((True, None), (False, "draft_model")):
            body = {"prompt": "def f(x):\n", "max_tokens": 24, "temperature": 0}
            body |= {"stream": stream, "speculation": method}
            assert server.post("/v1/completions", body, headers=KEY).status_code == 200
        yield server


@pytest.fixture(scope="module")
def series(server: Server) -> dict[str, set[str]]:
    """The labels of every series, by its name, as Prometheus reads them under the server's name in the compose file."""
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text("utf-8"))["scrape_configs"]
    (address,) = job["static_configs"][0]["targets"]
    told = server.get("/metrics", headers={"Host": address})
    assert told.status_code == 200, told.text
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(told.text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("query", queries())
def test_every_metric_of_the_dashboard_is_told(series: dict[str, set[str]], query: str) -> None:
    names = re.findall(r"(?:vllm|outrider):\w+|process_\w+", query)
    assert names
    asked = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    for name in names:
        assert name in series
        assert asked <= series[name], name
        assert "{" not in query or "model_name" in series[name], name


def test_legends_name_labels_that_are_kept() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], panel["title"]


def test_the_files_name_one_another() -> None:
    (source,) = _provisioned("datasources/prometheus.yaml")["datasources"]
    (provider,) = _provisioned("dashboards/outrider.yaml")["providers"]
    variables = DASHBOARD["templating"]["list"]
    used = {each["datasource"]["uid"] for each in [*DASHBOARD["panels"], *variables]}
    assert used == {source["uid"]}
    services = COMPOSE["services"]
    assert source["url"] == "http://prometheus:9090"
    assert {"outrider", "prometheus", "grafana"} == services.keys()
    mounted = [volume.split(":") for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    for place, inside, rights in mounted:
        assert (FOLDER / place).exists(), place
        assert rights == "ro", inside
    assert provider["options"]["path"] in [inside for _, inside, _ in mounted]
    assert (FOLDER / services["outrider"]["build"] / "Dockerfile").exists()


def _provisioned(name: str) -> Any:
    return yaml.safe_load((FOLDER / "grafana" / "provisioning" / name).read_text("utf-8"))

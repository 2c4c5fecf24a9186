"""examples/deploy: what compose starts, what Prometheus asks, and that the dashboard shows metrics that there are."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from option_parsers import PROGRAMS
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families

from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.serve.metrics import Metrics

DEPLOY = ROOT / "examples/deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DASHBOARD = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def filled_in(text: str) -> str:
    """With the variables at their defaults; one without is a folder of its name."""
    text = re.sub(r"\$\{(\w+)\}", r"/\1", text)
    while (found := re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)) != text:
        text = found
    return text


def test_the_server_starts_with_options_that_it_has() -> None:
    program, *words = shlex.split(filled_in(SERVICES["server"]["command"]))
    assert program == "dflash-serve" and "$" not in " ".join(words)
    PROGRAMS[program](words)
    assert words[words.index("--host") + 1] == "0.0.0.0", "or nothing outside its container reaches it"
    assert (DEPLOY / SERVICES["server"]["build"] / "Dockerfile").is_file()


def test_compose_ports_listen_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_every_file_and_volume_that_is_mounted_is_there() -> None:
    mounts = [mount.removesuffix(":ro").split(":") for s in SERVICES.values() for mount in map(filled_in, s["volumes"])]
    for source, _ in mounts:
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
        elif not source.startswith("/"):
            assert source in COMPOSE["volumes"], source
    read = {target: source for source, target in mounts}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    dashboard = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert dashboard in read and str(Path(dashboard).parent) == provider["options"]["path"]


def test_prometheus_scrapes_server_and_grafana_reads_prometheus() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{ServeConfig(target='t').port}"]}] and "server" in SERVICES
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES


# ---- the dashboard -----------------------------------------------------------------------------------------------


def queries() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable)


def exposed() -> set[str]:
    """The series of /metrics by their names; a metric that has no value yet has a type already."""
    return {
        family.name + suffix
        for family in text_string_to_metric_families(Metrics().render().decode())
        for suffix in SUFFIXES[family.type]
    }


def asked() -> set[str]:
    return {name for query in queries() for name in re.findall(r"\b(?:vllm|dflash):?\w+", query)}


def test_every_metric_that_is_shown_is_one_of_the_server() -> None:
    assert len(asked()) >= 15
    assert asked() - exposed() == set()


@pytest.mark.peers
def test_every_metric_that_is_shown_is_one_of_vllm() -> None:
    site = os.environ.get("DFLASH_PEERS_SITE")
    if not site:
        pytest.skip("DFLASH_PEERS_SITE is not set: run `make test-peers`")
    source = "".join(path.read_text() for path in sorted((ROOT / site / "vllm/v1").rglob("metrics/*.py")))
    source += (ROOT / site / "vllm/v1/spec_decode/metrics.py").read_text()
    known = set(re.findall(r'name="(vllm:\w+)"', source)) | set(re.findall(r'"(vllm:spec_decode_\w+)"', source))
    assert {re.sub("_(total|bucket)$", "", name) for name in asked()} - known == set()


def test_panels_are_complete_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"] and panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_dashboard_queries_are_well_formed(query: str) -> None:
    for opened, closed in ("()", "{}", "[]"):
        assert query.count(opened) == query.count(closed)
    if query.startswith("label_values"):
        return
    # a counter is shown by its rate over the interval that Grafana chooses, and every series by its model
    series = re.findall(r"(\w+ ?)?\((vllm:\w+)\{([^}]*)\}(\[\$__rate_interval\])?", query)
    assert len(series) == query.count("vllm:")
    for function, name, labels, interval in series:
        counts = name.endswith(("_total", "_bucket"))
        assert labels == 'model_name=~"$model"' and bool(interval) == counts == (function == "rate"), query

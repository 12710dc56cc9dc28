"""The files of examples/deploy: what they start, ask and draw is there."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections import defaultdict
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from support.http_server import chat_body, serve_model, settled
from support.paths import EXAMPLES, ROOT
from trinity.commands import COMMANDS
from trinity.server.command import KEY_VARIABLE, LAST_S, _make_parser

DEPLOY = EXAMPLES / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
MANIFESTS = {
    each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def instruction(name: str) -> Any:
    """The last instruction of this name in the Dockerfile, read as JSON."""
    return json.loads(re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# ---------------------------------------------------------------- the image


def test_the_image_starts_a_command_that_there_is() -> None:
    program, command, *arguments = instruction("ENTRYPOINT")
    assert program in PROJECT["scripts"]
    assert command in COMMANDS
    given = _make_parser().parse_args([*arguments, *instruction("CMD")])
    assert (given.model, given.host, given.port) == ("shapes", "0.0.0.0", 8000)
    assert f"EXPOSE {given.port}\n" in DOCKERFILE


def test_the_image_is_built_from_what_is_there() -> None:
    versions = set(re.findall(r"^FROM python:(3\.\d+)-slim", DOCKERFILE, re.MULTILINE))
    assert len(versions) == 1
    assert f"Programming Language :: Python :: {versions.pop()}" in PROJECT["classifiers"]
    (extras,) = re.findall(r"\[([\w,]+)\]\"", DOCKERFILE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    needed = {"src", "csrc", "pyproject.toml", PROJECT["readme"], "constraints.txt", "LICENSE"}
    assert sent >= needed


# ---------------------------------------------------------------- compose


def test_compose_mounts_files_that_are_there_and_scrapes_the_server_that_it_starts() -> None:
    server = COMPOSE["services"]["trinity"]
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    assert f"ARG {next(iter(server['build']['args']))}=" in DOCKERFILE
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), source
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["trinity:8000"]}]
    (secret,) = COMPOSE["services"]["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret]["environment"] == KEY_VARIABLE
    assert list(server["environment"]) == [KEY_VARIABLE]


def test_nothing_of_compose_is_reached_from_elsewhere() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_grafana_finds_its_dashboard_and_its_source() -> None:
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((DEPLOY / "grafana" / "provider.yaml").read_text(encoding="utf-8"))["providers"][0]
    assert mounted["./grafana/dashboard.json"] == f"{provider['options']['path']}/dashboard.json"
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text(encoding="utf-8"))["datasources"][0]
    assert source["type"] == "prometheus"
    assert source["url"].split("/")[-1].split(":")[0] in COMPOSE["services"]


# ---------------------------------------------------------------- what both have to keep


@pytest.mark.parametrize("arguments", [COMPOSE["services"]["trinity"]["command"], CONTAINER["args"]])
def test_arguments_are_understood(arguments: list[str]) -> None:
    given = _make_parser().parse_args(arguments)
    assert given.model == "shapes"
    assert given.placement == "1E1P1D"


def test_a_drain_has_the_time_that_it_is_told() -> None:
    server = COMPOSE["services"]["trinity"]
    assert seconds(server["stop_grace_period"]) > _make_parser().parse_args(server["command"]).drain + LAST_S
    drain = _make_parser().parse_args(CONTAINER["args"]).drain + LAST_S
    _, slept = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["terminationGracePeriodSeconds"] > int(slept) + drain


async def test_probes_ask_paths_that_answer_without_a_key() -> None:
    paths = {CONTAINER[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    paths |= set(re.findall(r"http://127\.0\.0\.1:8000(/\w+)", DOCKERFILE))
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"
    async with serve_model("llama") as served:
        assert {path: (await served.http.get(path)).status_code for path in paths} == {"/health": 200, "/ready": 200}


def test_the_service_reaches_the_pods() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    (port,) = CONTAINER["ports"]
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert port["containerPort"] == 8000
    assert {each["name"] for each in CONTAINER["volumeMounts"]} == {each["name"] for each in POD["volumes"]}
    assert CONTAINER["env"][0]["name"] == KEY_VARIABLE


# ---------------------------------------------------------------- the dashboard


async def test_the_dashboard_asks_for_what_a_scrape_gives() -> None:
    async with serve_model("llama", "P+D", max_waiting=1) as served:
        posts = [served.http.post("/v1/chat/completions", json=chat_body(max_tokens=4)) for _ in range(4)]
        codes = {response.status_code for response in await asyncio.gather(*posts)}
        assert codes == {200, 429}
        await settled(served.pipe)
        async with asyncio.timeout(60):  # reports of instances come ten times a second, perhaps after the last answer
            while len([load for load in served.pipe.loads.values() if load.predicted_s]) < len(served.pipe.instances):
                await asyncio.sleep(0.01)
        text = (await served.http.get("/metrics")).text
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        labels[family.name + ("_total" if family.type == "counter" else "")] |= set()
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    shown: list[str] = re.findall(r"\{\{(\w+)\}\}", json.dumps(DASHBOARD))
    asked = [*QUERIES, *(each["query"] for each in DASHBOARD["templating"]["list"])]
    named = {name for query in asked for name in re.findall(r"\b(?:vllm:|trinity_)\w+", query)}
    assert len(named) >= 20
    assert named <= labels.keys()
    by = {
        name.strip()
        for query in QUERIES
        for group in re.findall(r" by \(([^)]*)\)", query)
        for name in group.split(",")
    }
    known = {"exported_" + name if name == "instance" else name for name in set().union(*labels.values())}
    assert {*by, *shown} <= known, "Prometheus keeps instance for the target"


def test_each_panel_has_a_place_and_says_something() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    taken = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    assert all(panel["title"] for panel in panels)

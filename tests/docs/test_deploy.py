"""The files of examples/deploy: what they name exists, their commands are commands, and their times fit together."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT, blocks

from perdure.cli import main
from perdure.values.durations import parse_duration

DEPLOY = ROOT / "examples" / "deploy"
DIRECTIVES = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {
        *("User", "WorkingDirectory", "EnvironmentFile", "ExecStartPre", "ExecStart", "Restart", "RestartSec"),
        *("KillMode", "TimeoutStopSec", "UMask", "NoNewPrivileges", "PrivateTmp", "ProtectSystem", "ReadWritePaths"),
    },
    "Install": {"WantedBy"},
}
INSTRUCTIONS = {
    *("FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}
API_VERSIONS = {"Job": "batch/v1", "CronJob": "batch/v1", "Deployment": "apps/v1"}


def check_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` at the end: the options are parsed, and nothing is done."""
    assert main([*words, "--help"]) == 0, capsys.readouterr().err


def drain_s(words: Sequence[str]) -> float:
    span = parse_duration(words[words.index("--drain") + 1])
    assert span is not None
    return span.total_seconds()


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((DEPLOY / "perdure-worker.service").read_text())
    return parser


def unit_command(name: str) -> list[str]:
    program, *words = shlex.split(unit()["Service"][name])
    assert program.endswith("/bin/perdure")
    return words


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in manifests():
        spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
        yield one["kind"], spec["template"]


def test_the_unit_has_known_keys_and_waits_longer_than_the_worker_drains(capsys: pytest.CaptureFixture[str]) -> None:
    found = unit()
    assert {name: set(found[name]) for name in found.sections()} == DIRECTIVES
    for name in ("ExecStartPre", "ExecStart"):
        check_command(unit_command(name), capsys)
    assert float(found["Service"]["TimeoutStopSec"]) > drain_s(unit_command("ExecStart"))


def test_the_commands_of_the_unit_run_a_run(tmp_path: Path) -> None:
    """What systemd would start, in the folder of the app, until nothing is due."""

    def perdure(*words: str) -> str:
        environment = {**os.environ, "PERDURE_STORE": str(tmp_path / "agent.db")}
        command = [sys.executable, "-m", "perdure", *words]
        done = subprocess.run(command, cwd=DEPLOY, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    perdure(*unit_command("ExecStartPre"))
    perdure("start", "app.py:travel", "--args", "Lisbon", "--id", "trip")
    perdure(*unit_command("ExecStart"), "--once")
    assert '"Lisbon for 120"' in perdure("run", "show", "trip")


def test_the_image_copies_what_exists_and_its_commands_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    assert found[0][0] == "FROM"
    for name, rest in found:
        if name == "COPY":
            *sources, target = rest.split()
            assert target.startswith("/")
            assert [source for source in sources if not (ROOT / source).exists()] == []
    by_name = dict(found)
    [program] = json.loads(by_name["ENTRYPOINT"])
    assert program == "perdure"
    check_command(json.loads(by_name["CMD"]), capsys)
    program, *words = json.loads(by_name["HEALTHCHECK"].partition(" CMD ")[2])
    assert program == "perdure"
    check_command(words, capsys)
    order = [name for name, _ in found]
    assert order.index("USER") > max(at for at, name in enumerate(order) if name in ("RUN", "COPY")), "not as root"
    [extras] = re.findall(r"/perdure\[([\w,]+)\]", " ".join(rest for name, rest in found if name == "RUN"))
    known = (ROOT / "pyproject.toml").read_text()
    assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in known] == []


def test_the_manifests_name_the_image_its_user_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    [tag] = re.findall(r"docker build .* -t (\S+)", (DEPLOY / "Dockerfile").read_text())
    [uid] = re.findall(r"--uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    for one in manifests():
        assert one["apiVersion"] == API_VERSIONS[one["kind"]]
        assert re.fullmatch(r"[a-z][a-z-]*", one["metadata"]["name"])
    for kind, template in pods():
        spec = template["spec"]
        assert spec.get("restartPolicy", "Always") == ("Always" if kind == "Deployment" else "Never")
        [container] = spec["containers"]
        assert container["image"] == tag
        assert all(isinstance(word, str) for word in container["args"])
        check_command(container["args"], capsys)
        [store] = container["env"]
        assert store["name"] == "PERDURE_STORE"
        if kind == "Deployment":
            assert spec["terminationGracePeriodSeconds"] > drain_s(container["args"])
            assert container["securityContext"]["runAsUser"] == int(uid)
            program, *words = container["readinessProbe"]["exec"]["command"]
            assert program == "perdure"
            check_command(words, capsys)
    [deployment] = (one for one in manifests() if one["kind"] == "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = [block for block in blocks((ROOT / "docs/how-to/deploy.md").read_text()) if block.rest]
    assert len(shown) == 3
    for block in shown:
        assert block.text in (ROOT / block.rest).read_text(), f"{block.rest}: the page shows another text"

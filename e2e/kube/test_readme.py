"""The README's commands on a cluster, as written, with real workers; then what users do next."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.kube.kube import CHART, ROOT, Images, Kube, connect, identity, until
from e2e.kube.world import Load, settle, workers
from ecoserve.local.machine import free_ports

NAME = "smollm2"
MODEL = "SmolLM2-135M-Instruct"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def commands() -> list[str]:
    """Of the README's section on Kubernetes, those for a cluster that has the images."""
    section = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith("On Kubernetes")]
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("helm ", "kubectl "))]


@pytest.fixture(scope="module")
def told(
    images: Images, worker_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kube, str, dict[str, str]]]:
    """Runs the README's commands, in a namespace of their own instead of ``default``; gives it and
    what each printed."""
    folder = tmp_path_factory.mktemp("readme")
    namespace = f"readme-{uuid.uuid4().hex[:6]}"
    kube = connect(folder, namespace)
    kube.namespace(namespace)
    kube.namespace("ecoserve")
    try:
        printed = {line: run(kube, line, images, folder) for line in commands()}
        yield kube, namespace, printed
    finally:
        kube.ctl("delete", "esc", NAME, "--ignore-not-found", "--timeout=120s")
        kube.helm("uninstall", "ecoserve", "-n", "ecoserve", "--ignore-not-found", "--wait")
        kube.drop_namespace(namespace)
        kube.drop_namespace("ecoserve")


def run(kube: Kube, line: str, images: Images, folder: Path) -> str:
    """Runs a line as written, but for the names of images."""
    words = shlex.split(line)
    names = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    example = CHART / "examples/cpu.yaml"
    given = yaml.safe_load(example.read_text())["spec"]["engine"]["image"]
    if words[:2] == ["helm", "install"] and images.operator != names["operator"]:
        words += ["--set", f"images.operator={images.operator}"]
    if str(example.relative_to(ROOT)) in words and images.worker != given:
        mine = folder / "cpu.yaml"
        mine.write_text(example.read_text().replace(given, images.worker))
        words[words.index(str(example.relative_to(ROOT)))] = str(mine)
    program = {"helm": kube.helm_path, "kubectl": kube.kubectl}[words[0]]
    done = subprocess.run(
        [program, *words[1:]],
        cwd=ROOT,
        env=dict(kube.environment),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"{line}: {done.stderr or done.stdout}"
    return done.stdout


def test_the_commands_of_the_readme(told: tuple[Kube, str, dict[str, str]]) -> None:
    kube, _, printed = told
    assert [line.split()[:2] for line in printed] == [
        ["helm", "install"],
        ["kubectl", "apply"],
        ["kubectl", "get"],
    ]
    kube.ctl("-n", "ecoserve", "rollout", "status", "deployment/ecoserve", "--timeout=3m")
    kube.ctl("wait", "--for=condition=Ready", f"esc/{NAME}", "--timeout=15m", seconds=960)
    rows = [re.split(r"\s{2,}", line) for line in kube.ctl("get", "esc,mi").splitlines() if line]
    clusters = dict(zip(rows[0], rows[1], strict=False))
    assert clusters["NAME"] == f"ecoservecluster.ecoserve.io/{NAME}"
    assert clusters["MODEL"] == MODEL
    assert (clusters["DESIRED"], clusters["READY"], clusters["AVAILABLE"]) == ("2", "2", "True")
    macros = dict(zip(rows[2], rows[3], strict=False))
    assert macros["NAME"].startswith(f"macroinstance.ecoserve.io/{NAME}-")
    assert (macros["CLUSTER"], macros["READY"], macros["COMPLETE"]) == (NAME, "2", "True")
    told_of = kube.ctl("describe", "esc", NAME)
    for word in ("Scaled", "MacroInstanceMade", "Created", "Accepted"):
        assert word in told_of
    kube.helm("test", "ecoserve", "-n", "ecoserve", "--timeout", "3m", seconds=200)


def test_a_chat_and_a_stream_through_the_service(
    told: tuple[Kube, str, dict[str, str]],
) -> None:
    kube, _, _ = told
    (port,) = free_ports(1)
    forward = subprocess.Popen(
        [kube.kubectl, "port-forward", f"service/{NAME}", f"{port}:80"],
        env=dict(kube.environment),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert forward.stdout is not None
        assert forward.stdout.readline().startswith("Forwarding")
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        body = {"model": MODEL, "messages": question, "temperature": 0, "max_tokens": 16}
        answer = httpx.post(url, json=body, timeout=120).raise_for_status().json()
        assert "Tokyo" in answer["choices"][0]["message"]["content"]
        streamed = httpx.post(url, json=body | {"stream": True}, timeout=120).raise_for_status()
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        pieces = [json.loads(event)["choices"][0]["delta"].get("content") for event in events[:-1]]
        assert "Tokyo" in "".join(filter(None, pieces))
    finally:
        forward.terminate()
        forward.wait(10)


def test_up_and_down_and_a_rollout_of_engines(
    told: tuple[Kube, str, dict[str, str]], images: Images
) -> None:
    kube, namespace, _ = told
    # As it was, with fewer.
    kube.ctl("patch", "esc", NAME, "--type=merge", "-p", '{"spec": {"minReplicas": 1}}')
    kube.ctl("scale", f"esc/{NAME}", "--replicas=1")
    before = identity(settle(kube, namespace, NAME, 1, seconds=600))
    load = Load(kube, images, namespace, NAME, model=MODEL, clients=2, tokens=24)
    load.start()
    for replicas in (2, 1):
        kube.ctl("scale", f"esc/{NAME}", f"--replicas={replicas}")
        before = identity(settle(kube, namespace, NAME, replicas, seconds=600))
        load.goes_on()
    env = [
        *yaml.safe_load((CHART / "examples/cpu.yaml").read_text())["spec"]["engine"]["env"],
        {"name": "ROLLED", "value": "1"},
    ]
    patch = {"spec": {"engine": {"env": env}}}
    kube.ctl("patch", "esc", NAME, "--type=merge", "-p", json.dumps(patch))
    until(
        lambda: not identity(workers(kube, namespace, NAME)).items() & before.items(),
        "the worker is not replaced",
        900,
    )
    settle(kube, namespace, NAME, 1, seconds=600)
    load.goes_on()
    load.stop()

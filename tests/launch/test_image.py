"""The image of docker/Dockerfile, built on a minimal Debian, and the two nodes of docker/compose.yaml in it."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import hosts
from helpers.commands import ROOT, SMALL, facts, run
from helpers.images import Image, built_image

pytestmark = pytest.mark.needs("image")

COMPOSE = ROOT / "docker" / "compose.yaml"
NAMES_AND_VERSIONS = """
import importlib.metadata, json
print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with built_image(ROOT) as built:
        yield built


def services(**environment: str) -> dict[str, Any]:
    """The services of compose.yaml, each with its command as a list; variables as compose fills them in."""
    variable = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
    text = variable.sub(lambda match: environment.get(match[1], match[2] or ""), COMPOSE.read_text())
    return {
        name: service | {"command": shlex.split(service["command"])}
        for name, service in yaml.safe_load(text)["services"].items()
    }


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_image_trains_without_root(image: Image, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with image.container() as container:
        arguments = ["--standalone", "--nproc-per-node", "2", "launch/train.py"]
        assert list(image.default_arguments) == arguments
        command = image.command(container, [*arguments, *SMALL], volumes={tmp_path: "/workspace/runs"})
        done = run(command, tmp_path)
    assert done.code == 0, done.output
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_uid == 1000
    assert facts(directory)["result"]["stop"] == "budget=3rounds reached"
    assert facts(directory)["cluster"]["world_size"] == 2
    assert (directory / "model" / "model.safetensors").exists()


def test_any_user_can_run_it(image: Image, tmp_path: Path) -> None:
    """Also one that the image knows nothing of. W&B, which is offline here, wants to keep files at home."""
    tmp_path.chmod(0o777)
    settings = [setting for setting in SMALL if not setting.startswith("tracking")]
    volumes = {tmp_path: "/workspace/runs"}
    with image.container() as container:
        without_volume = image.command(container, ["-c", "touch ~/file runs/file"], user="4321:4321", entrypoint=["sh"])
        touched = run(without_volume, tmp_path)
        command = [*image.default_arguments, *settings, "run.directory=runs/mine"]
        done = run(image.command(container, command, user="4321:4321", volumes=volumes), tmp_path)
    assert (touched.code, touched.output) == (0, "")
    assert done.code == 0, done.output
    assert "denied" not in done.output
    files = [tmp_path / "mine", *(tmp_path / "mine").rglob("*")]
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in files} == {(4321, 4321)}
    assert list((tmp_path / "mine" / "wandb").glob("offline-run-*"))


def test_the_image_has_the_versions_that_are_tested_together(image: Image, tmp_path: Path) -> None:
    with image.container() as container:
        done = run(image.command(container, ["-c", NAMES_AND_VERSIONS], entrypoint=["python"]), tmp_path)
    assert done.code == 0, done.output

    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {canonical(name): version for name, version in (line.split("==") for line in lines)}
    # A build of torch may say which one it is (2.13.0+cpu), and bring the libraries that it was built with.
    found = {canonical(name): version.split("+")[0] for name, version in json.loads(done.output).items()}
    assert {"torch", "transformers", "numpy", "adloco-dist"} <= found.keys()
    assert {name: version for name, version in found.items() if pinned.get(name, version) != version} == {}
    with_torch = ("cuda", "nvidia", "triton")
    unpinned = {name for name in found if name not in pinned and not name.startswith(with_torch)}
    assert unpinned == {"adloco-dist", "setuptools"}


def test_compose_starts_one_job() -> None:
    nodes = services()
    for name, node in nodes.items():
        command = node["command"]
        assert option(command, "--nnodes") == str(len(nodes))
        assert option(command, "--rdzv-endpoint").split(":")[0] in nodes
        assert command[-1] == "launch/train.py"
        assert node["hostname"] == name
        context = COMPOSE.parent / node["build"]["context"]
        assert (context / node["build"]["dockerfile"]).samefile(ROOT / "docker" / "Dockerfile")
        assert context.samefile(ROOT)
        arguments = re.findall(r"^ARG (\w+)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
        assert node["build"]["args"].keys() <= set(arguments)
    (first, *others) = (node["command"] for node in nodes.values())
    assert others == [first] * (len(nodes) - 1)
    with_settings = services(SETTINGS="inner.lr=1e-3 'data.train=[a b]'")["node1"]["command"]
    assert with_settings[-3:] == ["launch/train.py", "inner.lr=1e-3", "data.train=[a b]"]


@pytest.mark.needs("hosts")
def test_the_nodes_of_compose_train_together(image: Image, tmp_path: Path) -> None:
    """compose.yaml's commands, each in a container of its own on a host of its own, with one volume."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    nodes = services(SETTINGS=shlex.join([*SMALL, "run.directory=runs/both"]))
    volumes = {tmp_path / "runs": "/workspace/runs"}
    with ExitStack() as stack:
        machines = dict(zip(nodes, stack.enter_context(hosts.hosts(len(nodes))), strict=True))
        addresses = {name: machine.address for name, machine in machines.items()}
        processes = []
        for name, node in nodes.items():
            container = stack.enter_context(image.container(addresses))
            output = stack.enter_context((tmp_path / name).open("w"))
            command = image.command(container, node["command"], host_name=node["hostname"], volumes=volumes)
            processes.append(machines[name].start(command, output))
        codes = [process.wait(timeout=180) for process in processes]
    assert codes == [0] * len(nodes), "\n".join((tmp_path / name).read_text() for name in nodes)
    record = facts(tmp_path / "runs" / "both")
    assert set(record["cluster"]["hosts"]) == set(nodes)
    assert record["cluster"]["nodes"] == [0, 0, 1, 1]
    assert record["result"]["stop"] == "budget=3rounds reached"

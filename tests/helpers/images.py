"""The project's image, built on a minimal Debian and run without a daemon; needs root, buildah and debootstrap."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
import torch

SUITE = "bookworm"
# Also where buildah has no overlay file system, and every layer and container is a whole copy of what is below it.
DISK_BYTES = 8_000_000_000 if torch.version.cuda is None else 40_000_000_000
PIP_OPTIONS = "index-url extra-index-url find-links no-index trusted-host cert proxy timeout default-timeout retries"


@dataclass(frozen=True)
class Image:
    """A built image, in a storage of its own."""

    buildah: tuple[str, ...]
    name: str
    entrypoint: tuple[str, ...]
    default_arguments: tuple[str, ...]

    @contextmanager
    def container(self, addresses: Mapping[str, str] | None = None) -> Iterator[str]:
        """A fresh container, removed at the end; it knows `addresses` of other hosts by their names."""
        known = [f"--add-host={name}:{address}" for name, address in (addresses or {}).items()]
        container = _call(*self.buildah, "from", "--pull=never", *known, self.name).strip()
        yield container
        _call(*self.buildah, "rm", container)

    def command(
        self,
        container: str,
        arguments: Sequence[str] = (),
        host_name: str = "localhost",
        user: str | None = None,
        volumes: Mapping[Path, str] | None = None,
        entrypoint: Sequence[str] | None = None,
    ) -> list[str]:
        """The command that does in a container what `docker run --network host IMAGE arguments` would do.

        host_name must resolve there, user is uid:gid, volumes say where folders of this machine are there.
        """
        options = ["--hostname", host_name, *(["--user", user] if user else [])]
        options += [f"--volume={source}:{target}" for source, target in (volumes or {}).items()]
        program = [*(entrypoint or self.entrypoint), *(arguments or self.default_arguments)]
        return [*self.buildah, "run", *options, container, "--", *program]


def why_unavailable() -> str | None:
    """Why this machine cannot build the image; None if it can."""
    if os.geteuid() != 0:
        return "building the image needs root"
    if missing := [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian packages of these names)"
    folder = _folder()
    if shutil.disk_usage(folder).free < DISK_BYTES:
        return f"building the image needs {DISK_BYTES / 1e9:.0f} GB in {folder} (TMPDIR names another folder)"
    try:
        urllib.request.urlopen(f"{_mirror()}/dists/{SUITE}/Release", timeout=60).close()
    except OSError as error:
        return f"the Debian mirror {_mirror()} cannot be reached ({error})"
    return None


@contextmanager
def built_image(project: Path) -> Iterator[Image]:
    """The image that `project`'s Dockerfile makes on a minimal Debian, removed at the end with all its containers."""
    with tempfile.TemporaryDirectory(prefix="adloco-image-", dir=_folder()) as folder:
        buildah = _buildah(folder, "overlay")
        if subprocess.run([*buildah, "info"], capture_output=True, check=False).returncode != 0:
            buildah = _buildah(folder, "vfs")
        try:
            _make_base(buildah)
            yield _build(buildah, project, Path(folder) / "pip.conf")
        finally:
            _call(*buildah, "rm", "--all")  # unmounts them


def _folder() -> Path:
    """Where images are kept: in memory if there is plenty of it, for a disk may take minutes to remove their files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and min(shutil.disk_usage(memory).free, psutil.virtual_memory().available) >= 2 * DISK_BYTES:
        return memory
    return Path(tempfile.gettempdir())


def _buildah(folder: str, driver: str) -> tuple[str, ...]:
    storage = ("--storage-driver", driver, "--root", f"{folder}/{driver}", "--runroot", f"{folder}/{driver}-run")
    return ("env", "BUILDAH_ISOLATION=chroot", f"TMPDIR={folder}", "buildah", *storage)


def _make_base(buildah: tuple[str, ...]) -> None:
    """Debian with Python and pip: neither torch nor ensurepip, and closed to pip, as the strictest of bases."""
    container = _call(*buildah, "from", "scratch").strip()
    root = Path(_call(*buildah, "mount", container).strip())
    packages = "--include=ca-certificates,python3,python3-pip"
    _call("debootstrap", "--variant=minbase", packages, SUITE, str(root), _mirror())
    shutil.rmtree(root / "var/cache/apt")
    _call(*buildah, "commit", "--quiet", "--rm", container, "localhost/base")


def _build(buildah: tuple[str, ...], project: Path, pip_conf: Path) -> Image:
    name, settings = "localhost/built", _pip_settings()
    lines = (f"{option} = {value}".replace("\n", "\n    ") for option, value in settings.items())
    pip_conf.write_text("\n".join(["[global]", *lines, ""]))
    options = ["--pull=never", "--layers=false", "--build-arg=BASE=localhost/base", f"--secret=id=pip,src={pip_conf}"]
    options += [f"--volume={path}:{path}:ro" for path in _local_paths(settings)]
    _call(*buildah, "build", *options, f"--file={project}/docker/Dockerfile", f"--tag={name}", str(project))
    config = json.loads(_call(*buildah, "inspect", "--type", "image", name))["OCIv1"]["config"]
    return Image(buildah, name, tuple(config["Entrypoint"]), tuple(config["Cmd"]))


def _mirror() -> str:
    """Where this machine's apt takes the suite from; on machines of another system, Debian's own."""
    if shutil.which("apt-get"):
        targets = _call("apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)")
        for release, component, uri in (line.split(maxsplit=2) for line in targets.splitlines()):
            if (release, component) == (SUITE, "main") and uri.startswith(("http:", "https:", "file:")):
                return uri.rstrip("/")
    return "http://deb.debian.org/debian"


def _pip_settings() -> dict[str, str]:
    """What pip is configured with here about indexes and how to reach them, by its files and its environment."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # the later wins
    for line in _call(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found and option in PIP_OPTIONS.split():
            found[section][option] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def _local_paths(settings: Mapping[str, str]) -> set[Path]:
    """Files and folders of this machine that pip's settings name."""
    paths: set[Path] = set()
    for option, word in ((option, word) for option, value in settings.items() for word in value.split()):
        path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word)
        if path.is_absolute() and path.exists():
            has_files_beside_it = option.endswith("index-url") and path.parent != Path("/")
            paths.add(path.parent if has_files_beside_it else path)
    return paths


def _call(*arguments: str) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout

"""What is shipped: the lists of the wheel and the source distribution, their metadata, the scripts, the Dockerfile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "diffpure"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (file,) = dist.glob("*.whl")
    assert file.name == f"diffpure-{PROJECT['version']}-py3-none-any.whl"
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == FILES


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"/weights/cifar10-(small|small-resnet|small-robust|resnet|resnet-at|resnet-robust|vit-tiny)\.safetensors", 7),
        (r"/weights/photos-small(-lite0)?\.safetensors", 2),
        (r"/models/(embedded|scores|classifiers|defenses)\.toml", 4),
        (r"/specs/cifar10-small-linf\.toml", 1),
        (r"/data/cifar10-samples\.(png|txt)", 2),
        (r"/data/imagenet-wnids\.txt", 1),
        (r"diffpure/py\.typed", 1),
    ],
)
def test_the_wheel_has_the_weights_specs_and_data(wheel: zipfile.ZipFile, pattern: str, count: int) -> None:
    sizes = {info.filename: info.file_size for info in wheel.infolist() if re.search(f"{pattern}$", info.filename)}
    assert len(sizes) >= count
    assert all((PACKAGE.parent / name).stat().st_size == size for name, size in sizes.items())


def test_the_wheel_has_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = f"diffpure-{PROJECT['version']}.dist-info"
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert wheel.read(f"{info}/licenses/NOTICE") == (ROOT / "NOTICE").read_bytes()
    assert "diffpure = diffpure.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_metadata_is_what_an_index_shows(metadata: Message) -> None:
    from trove_classifiers import classifiers  # hatchling brings it

    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Paper, https://arxiv.org/abs/2205.07460" in metadata.get_all("Project-URL", [])
    assert set(metadata.get_all("Classifier", [])) <= classifiers
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_source_distribution_can_be_built_and_tested(dist: Path) -> None:
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in FILES} <= names
    assert {"pyproject.toml", "constraints.txt", "Makefile", "README.md", "LICENSE", "NOTICE"} <= names
    assert {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").glob("*.py")} <= names
    assert {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests" / "golden").iterdir()} <= names


@pytest.mark.parametrize("script", ["run", "test-all"])
def test_the_scripts_of_the_tests_are_shell_that_stops_at_errors(script: str) -> None:
    file = ROOT / ".ci" / script
    assert file.stat().st_mode & 0o111
    assert "\nset -euo pipefail\n" in file.read_text()
    assert subprocess.run(["bash", "-n", file]).returncode == 0


# ---------------------------------------------------------------------------------------------------- Dockerfile


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))
    return [(word, rest) for word, rest in pairs]


def test_the_image_is_slim_and_runs_the_command_as_a_user_without_rights() -> None:
    found = instructions()
    assert {rest.split()[0] for word, rest in found if word == "FROM"} == {"python:3.11-slim"}
    last = dict(found)
    assert last["USER"] not in ("root", "0")
    assert any(word == "RUN" and rest.startswith("useradd") and last["USER"] in rest for word, rest in found)
    words = [word for word, _ in found]
    assert "RUN" not in words[words.index("USER") :]
    (command,) = json.loads(last["ENTRYPOINT"])
    assert command in PROJECT["scripts"]


def test_the_image_gets_torch_first_and_held() -> None:
    runs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert runs[0].endswith("/cpu torch")
    assert all("--constraint /tmp/constraints.txt" in run for run in runs)


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for line in copied for source in line}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / source).exists() for source in sources)
    assert lines.index("*") < min(lines.index(f"!{source}") for source in sources)
    assert {line[1:] for line in lines if line.startswith("!")} == sources
    assert {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "src"} <= sources

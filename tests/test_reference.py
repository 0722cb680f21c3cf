"""The reference of specs says something of every key, and what it says is what the code does."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import pytest
from typer.testing import CliRunner

from diffpure.attacks.presets import ATTACKS
from diffpure.cli import app
from diffpure.data.sources import DataSpec
from diffpure.diffusion.gradients import GRADIENT_MODES
from diffpure.diffusion.samplers import SAMPLERS, FewStep
from diffpure.errors import InputError
from diffpure.experiments.reference import SECTIONS, notes, reference
from diffpure.experiments.spec import EvaluationSpec, ModelSpec
from diffpure.purifiers import PURIFIERS
from diffpure.threats import THREATS


@dataclass
class Base:
    """A base. `__module__` is made that of the package below.

    size: in pixels.   first, second: two words,
    over two lines.
    """

    size: int = 1
    first: str = ""
    second: str = ""


@dataclass
class Derived(Base):
    """Derived.

    size: in metres.
    """

    third: float = 1.0  # a comment


def test_notes_come_from_docstrings_and_comments_and_the_nearest_class_decides(monkeypatch):
    for cls in (Base, Derived):
        monkeypatch.setattr(cls, "__module__", "diffpure.made_up")
    text = {"first": "two words, over two lines", "second": "two words, over two lines"}
    import diffpure.experiments.reference as module

    monkeypatch.setattr(module, "_from_comments", lambda cls: {"third": "a comment"} if cls is Derived else {})
    assert notes(Base) == {"size": "in pixels", **text}
    assert notes(Derived) == {"size": "in metres", **text, "third": "a comment"}


def test_comments_behind_fields_are_notes():
    assert notes(DataSpec)["subset"] == 'a fixed subset such as "cifar10/paper"'
    assert notes(FewStep)["t_star"] == "how far to diffuse, in (0, 1]"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_every_table_has_a_meaning(section):
    lines = [line for line in reference(section).splitlines() if line.startswith("| `")]
    assert lines
    assert [line for line in lines if re.search(r"\|\s*\|$", line)] == []


def test_every_member_of_every_registry_and_every_key_is_there():
    text = reference()
    for registry in (ATTACKS, SAMPLERS, GRADIENT_MODES, PURIFIERS, THREATS):
        assert [name for name in registry if f"`{name}`" not in text and f'"{name}"' not in text] == []
    for cls in (EvaluationSpec, ModelSpec, DataSpec):
        assert [f.name for f in fields(cls) if f"| `{f.name}` |" not in text] == []


def test_defaults_are_those_of_the_code():
    assert "| `steps` | `10` |" in reference("sampler")
    assert "`iterations = 40`" in reference("attacks")
    assert "| `threat` | `Linf(eps=8/255)` |" in reference("spec")


def test_the_command_prints_one_section_and_names_what_there_is():
    run = CliRunner().invoke(app, ["spec", "threat"])
    assert run.exit_code == 0
    assert "No pixel changes by more than eps." in run.stdout
    with pytest.raises(InputError, match="attacks"):
        reference("atacks")

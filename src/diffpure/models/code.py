"""A user's own model, from a function of a Python file or package: `python:PLACE:FUNCTION`.

    python:my_package.models:make_classifier          a module that can be imported
    python:models/mine.py:make_classifier             a file, relative to the folder of the spec

The function is called with a table of arguments and returns the model. Loading it runs its code, as do TorchScript
and ONNX files, so all of them are loaded only where the caller allows code in this very call, never because a file
that somebody else wrote asks for it.

`SOURCE`, an attribute of the loaded module, holds the SHA-256 of the file whose code it runs; `identify` includes it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from diffpure.errors import InputError
from diffpure.models.checkpoints import sha256

SCHEME: Final = "python:"
SOURCE: Final = "source_sha256"  # the attribute of a loaded module that names the file of its code


def is_code(name: object) -> bool:
    """Whether a name is one of the `python:` scheme."""
    return isinstance(name, str) and name.startswith(SCHEME)


def require_code_allowed(what: str, allow_code: bool) -> None:
    """Refuse what runs code of its own, unless the caller allowed it."""
    if not allow_code:
        raise InputError(
            f"{what} runs code when it is loaded, which is done only with --allow-code (in Python: allow_code=True)."
        )


def load_object(
    spec: str, arguments: Mapping[str, Any] | None = None, allow_code: bool = False, base: Path | None = None
) -> Any:
    """What the function of a `python:` name returns for these arguments; a file is relative to the folder `base`."""
    place, _, name = spec.removeprefix(SCHEME).rpartition(":")
    if not is_code(spec) or not place or not name:
        raise InputError(f"{spec!r} is not python:PACKAGE.MODULE:FUNCTION or python:FILE.py:FUNCTION.")
    require_code_allowed(spec, allow_code)
    module = _from_file((base or Path()) / place) if place.endswith(".py") else _from_package(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{place} has no function {name!r}, which {spec!r} asks for.")
    made = function(**checked_arguments(spec, function, arguments))
    mark(made, Path(str(module.__file__)))
    return made


def mark(made: object, file: Path) -> None:
    """Record on a module which file its code comes from; a plain function is identified by its own code."""
    if hasattr(made, "state_dict"):
        setattr(made, SOURCE, sha256(file))


def _from_file(path: Path) -> ModuleType:
    """The module in a Python file, whose folder can be imported from while it is run, as Python does it itself."""
    if not os.path.isfile(path):
        raise InputError(f"There is no Python file {path}.")
    path = path.resolve()
    name = f"diffpure_user_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickles look themselves up there
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except ImportError as error:
        raise InputError(f"{path.name} could not be imported ({error}).") from error
    except SyntaxError as error:
        raise InputError(f"{path.name} is not valid Python (line {error.lineno}: {error.msg}).") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _from_package(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except (ImportError, ValueError, TypeError) as error:
        raise InputError(f"The module {name!r} could not be imported ({error}).") from error
    if getattr(module, "__file__", None) is None:
        raise InputError(f"The module {name!r} has no file, so its code cannot be identified.")
    return module


def checked_arguments(spec: str, function: Any, arguments: Mapping[str, Any] | None, *before: object) -> dict[str, Any]:
    """A table of arguments, once the function takes them after those that stand before."""
    try:
        inspect.signature(function).bind(*before, **(arguments or {}))
    except TypeError as error:
        raise InputError(f"{spec} does not take these arguments ({error}).") from error
    except ValueError:
        pass  # a function without a signature checks them itself
    return dict(arguments or {})

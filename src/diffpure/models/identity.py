"""`identify`: a SHA-256 that names what a part of a model computes, equal in every process.

    module       classes and settings of all submodules, parameters and buffers, values and functions among their
                 attributes, hooks, the code of TorchScript, and the SHA-256 of the file of their code (`code.SOURCE`);
                 of this package's own classes neither names nor options that are off, so that they may be renamed
    function     its bytecode and constants, its defaults, what it closes over, the global names it uses
    other        numbers, texts, arrays, tensors, containers, dataclasses, bound methods, partial functions

Functions of installed packages and of Python itself are named, not opened; a user's own module is named by the SHA-256
of its file. What cannot be told apart in this way raises `Unidentifiable`, so that a run is not resumed with another
model by mistake.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import struct
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from diffpure.errors import InputError
from diffpure.models.code import SOURCE

_PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum, PurePath),
    *(torch.dtype, torch.memory_format, torch.layout, np.dtype),
)
_BUILT_IN: Final = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType),
)
_ARRAYS: Final = (Tensor, np.ndarray, np.generic)
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_PACKAGES: Final = ("site-packages", "dist-packages")
_OURS_AND_PYTHONS: Final = (
    str(Path(__file__).resolve().parents[1]),
    *(str(Path(sysconfig.get_path(key)).resolve()) for key in ("stdlib", "platstdlib")),
)


class Unidentifiable(InputError):
    """What a part of a model computes cannot be named, so nobody could tell it from another."""


def identify(part: object) -> str:
    """The SHA-256 of what a part of a model computes: a module, a function or any other callable."""
    walk = _Walk()
    walk.add(part, type(part).__name__)
    return walk.sha.hexdigest()


@final
class _Walk:
    """One walk over a part; an object that is met again is named by when it was met first."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        self.met: dict[int, int] = {}
        self.kept: list[object] = []  # so that no address is used twice

    def say(self, *words: object) -> None:
        """Hash words, each with its length, so that no two sequences of them look alike."""
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            self.sha.update(struct.pack("<Q", len(data)))
            self.sha.update(data)

    def add(self, value: Any, where: str) -> None:
        """Hash a value of any kind; `where` is how a person finds it."""
        if isinstance(value, _PLAIN):
            self.say("plain", type(value).__name__, repr(value))
        elif isinstance(value, torch.device):
            self.say("device")  # where it is computed is not what is computed
        elif isinstance(value, _ARRAYS):
            self.add_array(value, where)
        elif isinstance(value, tuple | frozenset):  # whether equal constants are one object differs by process
            self.add_container(value, where)
        elif id(value) in self.met:
            self.say("again", self.met[id(value)])
        else:
            self.met[id(value)] = len(self.met)
            self.kept.append(value)
            self.add_object(value, where)

    def add_object(self, value: Any, where: str) -> None:
        """Hash what may hold other values, and itself among them."""
        if isinstance(value, nn.Module):
            self.add_module(value, where)
        elif isinstance(getattr(value, SOURCE, None), str):
            self.say("source", getattr(value, SOURCE))
        elif isinstance(value, torch.jit.ScriptFunction):
            self.add_script(value, where)
        elif callable(value):
            self.add_callable(value, where)
        else:
            self.add_container(value, where)

    def add_module(self, module: nn.Module, where: str) -> None:
        """Hash a module: what it is made of, what it holds, and whose code it runs."""
        for name, part in module.named_modules():
            here = f"{where}.{name}" if name else where
            self.met.setdefault(id(part), len(self.met))
            self.say("module", name, part.extra_repr(), getattr(part, SOURCE, ""))
            self.say(*(word for kind in type(part).__mro__ for word in _source(kind)))
            if isinstance(part, torch.jit.ScriptModule):
                if hasattr(part, "forward"):
                    self.add_script(part, here)
                continue
            for key, value in _attributes(part).items():
                self.say("attribute", key)
                self.add(value, f"{here}.{key}")
        rest = dict(module.state_dict())  # what quantised layers and others keep beside parameters and buffers
        for kind, tensors in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            for name, tensor in tensors(remove_duplicate=False):
                self.say(kind, name)
                self.add_array(tensor, f"{where}.{name}")
                rest.pop(name, None)
        for name, value in rest.items():
            self.say("state", name)
            self.add(value, f"{where}.{name}")

    def add_script(self, scripted: Any, where: str) -> None:
        """Hash the code of TorchScript, and the tensors that are constants in it."""
        self.say("script", scripted.code)
        graph = scripted.inlined_graph  # its nodes live as long as it does
        for node in graph.findAllNodes("prim::Constant"):
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                self.add_array(node.t("value"), where)

    def add_array(self, value: Any, where: str) -> None:
        """Hash type, shape and bytes of numbers."""
        if isinstance(value, Tensor):
            if value.is_meta or value.layout is not torch.strided:
                raise _unidentifiable(where, "a tensor without plain values")
            value = value.detach().cpu().dequantize() if value.is_quantized else value.detach().cpu()
            value = value.resolve_conj().resolve_neg()
            self.say("tensor", value.dtype, tuple(value.shape))
            self.sha.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            return
        if value.dtype.hasobject:
            raise _unidentifiable(where, "an array of Python objects")
        self.say("array", value.dtype.str, value.shape, value.tobytes())

    def add_callable(self, value: Any, where: str) -> None:
        """Hash what can be called: its own code, or its name where it is a package's."""
        if isinstance(value, functools.partial):
            self.say("partial")
            self.add([value.func, value.args, value.keywords], where)
        elif isinstance(value, types.MethodType):
            self.say("method")
            self.add([value.__self__, value.__func__], where)
        elif isinstance(value, types.FunctionType):
            self.add_function(value, where)
        elif isinstance(value, _BUILT_IN):
            owner = getattr(value, "__self__", None)
            self.say("built in", value.__qualname__)
            self.add(None if isinstance(owner, type | types.ModuleType) else owner, where)
        elif isinstance(value, type):
            self.add_class(value, where)
        elif callable(getattr(value, "__wrapped__", None)):  # lru_cache and its like
            self.say("wrapped")
            self.add(value.__wrapped__, where)
        else:
            self.add_container(value, where)

    def add_function(self, function: types.FunctionType, where: str) -> None:
        """Hash a function: its code unless a package has it, its defaults, and what it closes over."""
        self.say("function")
        if _foreign(function.__code__.co_filename):
            self.say(function.__module__, function.__qualname__)
        else:
            self.add_code(function.__code__, function.__globals__, where)
        self.add([function.__defaults__, function.__kwdefaults__], f"the defaults of {where}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.add(_content(cell), f"{name!r} in {where}")

    def add_code(self, code: types.CodeType, names: Mapping[str, Any], where: str) -> None:
        """Hash bytecode, constants and the global names that are used, but no line number and no path."""
        self.say("code", code.co_code, code.co_names, code.co_flags, code.co_argcount, code.co_kwonlyargcount)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.add_code(constant, names, where)
            else:
                self.add(constant, f"a constant of {where}")
        used = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        for name in sorted(used & set(names)):
            self.say("global", name)
            self.add(names[name], f"{name!r} in {where}")

    def add_class(self, kind: type, where: str) -> None:
        """Hash a class: its name, and the functions of one that no package has."""
        self.say("class", kind.__qualname__)
        for key, function in sorted(vars(kind).items()):
            if isinstance(function, types.FunctionType) and not _foreign(function.__code__.co_filename):
                self.say(key)
                self.add(function, f"{where}.{key}")

    def add_container(self, value: Any, where: str) -> None:
        """Hash a collection, a Python module, or an object by its class and attributes."""
        if isinstance(value, Mapping):
            self.say("mapping", len(value))
            self.add_items(value.items(), where)
        elif isinstance(value, list | tuple):
            self.say(type(value).__name__, len(value))
            for i, item in enumerate(value):
                self.add(item, f"{where}[{i}]" if len(value) > 3 else where)
        elif isinstance(value, set | frozenset):
            self.say("set", *sorted(identify(item) for item in value))
        elif isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            foreign = file is None or _foreign(file)
            self.say("import", value.__name__, b"" if foreign else Path(str(file)).read_bytes())
        elif is_dataclass(value) or (hasattr(value, "__dict__") and not _is_native(type(value))):
            self.say("object")
            self.add(type(value), where)
            self.add_items(_state(value).items(), where)
        else:
            raise _unidentifiable(where, f"a {type(value).__name__}")

    def add_items(self, pairs: Iterable[tuple[Any, Any]], where: str) -> None:
        """Hash keys and values in the order that they have."""
        for key, value in pairs:
            self.add(key, f"a key of {where}")
            self.add(value, f"{where}.{key}")


def _content(cell: types.CellType) -> Any:
    """What a function closes over under one name, which may have no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ...


def _attributes(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module that count; of a class of this package an option that is off does not.

    So a model of this package keeps its name when its class gains an option.
    """
    found = {key: value for key, value in vars(part).items() if not key.startswith("_") and _matters(value)}
    if _ours(type(part)):
        found = {key: value for key, value in found.items() if not isinstance(value, _PLAIN) or value}
    hooks = {key: list(vars(part)[key].values()) for key in _HOOKS if vars(part).get(key)}
    return {key: value for key, value in sorted({**found, **hooks}.items()) if key not in ("training", SOURCE)}


def _state(value: Any) -> dict[str, Any]:
    """What an object holds; of a dataclass of this package a field at its default does not count, as above."""
    if not is_dataclass(value):
        return dict(sorted(vars(value).items()))
    usual = {f.name: f.default for f in fields(value)} if _ours(type(value)) else {}
    state = {f.name: getattr(value, f.name) for f in fields(value)}
    return {key: now for key, now in state.items() if not (isinstance(now, _PLAIN) and now == usual.get(key, MISSING))}


def _matters(value: object) -> bool:
    """Whether an attribute of a module is a value or a function, which the walk must be able to name."""
    if isinstance(value, Mapping):
        return all(map(_matters, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_matters, value))
    return isinstance(value, (*_PLAIN, *_ARRAYS)) or callable(value) or is_dataclass(value)


def _source(kind: type) -> tuple[str, ...]:
    """The name of a class (but of this package), with its source where it is a user's own and can be found."""
    if _ours(kind):
        return ()
    module = sys.modules.get(kind.__module__)
    if _foreign(getattr(module, "__file__", None) or "<frozen>"):
        return (kind.__qualname__,)
    try:
        return (kind.__qualname__, inspect.getsource(kind))
    except (OSError, TypeError):
        return (kind.__qualname__,)


def _ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


@functools.cache
def _foreign(file: str) -> bool:
    """Whether code belongs to Python, to an installed package or to this one."""
    path = Path(file).resolve()
    return (
        file.startswith("<frozen")
        or str(path).startswith(_OURS_AND_PYTHONS)
        or not set(_PACKAGES).isdisjoint(path.parts)
    )


def _is_native(kind: type) -> bool:
    """Whether objects of a class keep a part of what they are outside Python's sight."""
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__ if base is not object]
    files = [getattr(module, "__file__", None) for module in modules if module and module.__name__ != "__main__"]
    return not all(file is not None and file.endswith((".py", ".pyc")) for file in files)


def _unidentifiable(where: str, what: str) -> Unidentifiable:
    return Unidentifiable(
        f"{where} is {what}, which cannot be identified, so a run with it cannot be resumed; use an nn.Module or "
        "functions of plain values."
    )

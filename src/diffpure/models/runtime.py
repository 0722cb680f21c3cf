"""Networks in files of ONNX and OpenVINO, run on the CPU by their runtimes with as many threads as torch has.

What is run are the bytes that were read and hashed: a file that refers to others is refused by the runtimes, because it
is never opened by its name. `diffpure export` writes a table of what a network is (`info`) into the file.

OpenVINO compiles a network anew for every shape of its inputs: with a fixed shape the same network takes about three
quarters of the time that one with a free shape takes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffpure.errors import InputError

Runtime = Literal["onnx", "openvino"]
Arrays = dict[str, NDArray[Any]]
Session = Callable[[Arrays], NDArray[Any]]
KEY: Final = "diffpure"  # of our table in the file
KEPT: Final = 8  # compiled networks that are kept, each for one shape and number of threads


@final
class Compiled:
    """One network of named inputs and one output, out of the bytes of an ONNX file or of OpenVINO's two files.

    data: ONNX, or OpenVINO's XML with its `weights`; OpenVINO runs both, ONNX Runtime the first.   origin: what
    messages call it.
    """

    def __init__(self, runtime: Runtime, data: bytes, weights: bytes = b"", *, origin: str) -> None:
        self.runtime, self.data, self.weights, self.origin = runtime, data, weights, origin
        self.sha256 = hashlib.sha256(data + weights).hexdigest()
        self._sessions: OrderedDict[tuple[Any, ...], Session] = OrderedDict()
        self._lock = threading.Lock()
        try:
            self.inputs, text = RUNTIMES[runtime].describe(self)
        except InputError:
            raise
        except Exception as error:  # each runtime raises a family of its own
            kind = "OpenVINO" if weights or data[:1] == b"<" else "ONNX"
            raise InputError(f"{origin} is damaged or no file of {kind}, as `diffpure export` writes one.") from error
        self.info = _table(text, origin)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in this process or another, compiles again."""
        return _again, (self.runtime, self.data, self.weights, self.origin)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The output for the inputs by name, on the CPU; nothing is differentiated."""
        arrays = {name: np.ascontiguousarray(value.detach().cpu().numpy()) for name, value in inputs.items()}
        try:
            return torch.from_numpy(self._session(arrays)(arrays))
        except InputError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {value.shape}" for name, value in arrays.items())
            raise InputError(f"{self.origin} cannot be run on {shapes}.") from error

    def _session(self, arrays: Arrays) -> Session:
        with self._lock:
            make = RUNTIMES[self.runtime]
            key = (torch.get_num_threads(), *(value.shape for value in arrays.values() if make.fixed))
            if key not in self._sessions:
                self._sessions[key] = make.session(self, arrays, torch.get_num_threads())
                if len(self._sessions) > KEPT:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(key)
            return self._sessions[key]


def no_gradient(x: Tensor, out: Tensor, name: str) -> Tensor:
    """What was computed from x outside autograd: its gradient is refused, where autograd alone would be silent."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return out
    refusing: Tensor = _NoGradient.apply(x, out, name)  # type: ignore[no-untyped-call]
    return refusing


class _NoGradient(torch.autograd.Function):
    """The identity of an output, whose backward pass is an error: a gradient of zero would make any attack fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, name: str) -> Tensor:
        ctx.name = name
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise InputError(
            f"{ctx.name} gives no gradients; only black-box attacks can be run on it, and BPDA of a purifier."
        )


def package(name: str, extra: Runtime) -> Any:
    """An optional package."""
    try:
        return import_module(name)
    except Exception as error:  # a package built for another one may raise anything
        raise InputError(
            f"This needs the package {name}, which could not be imported ({error}): pip install 'diffpure[{extra}]'."
        ) from error


def _again(runtime: Runtime, data: bytes, weights: bytes, origin: str) -> Compiled:
    return Compiled(runtime, data, weights, origin=origin)


def _table(text: str | None, origin: str) -> dict[str, Any]:
    """Our table in a file, which may be a stranger's."""
    try:
        found = json.loads(text or "")
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("version") != 1:
        raise InputError(f"{origin} does not say what it computes; accepted are files that `diffpure export` wrote.")
    return found


# ------------------------------------------------------------------------------------------------------- runtimes


@final
class _ONNX:
    fixed = False  # one session for all shapes

    @staticmethod
    def session(network: Compiled, arrays: Arrays, threads: int) -> Session:
        session = _ONNX._open(network, threads)
        return lambda inputs: np.asarray(session.run(None, inputs)[0])

    @staticmethod
    def describe(network: Compiled) -> tuple[list[str], str | None]:
        session = _ONNX._open(network, 1)
        return [entry.name for entry in session.get_inputs()], session.get_modelmeta().custom_metadata_map.get(KEY)

    @staticmethod
    def _open(network: Compiled, threads: int) -> Any:
        runtime = package("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4  # what goes wrong is raised, in one sentence
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # which stops other work
        return runtime.InferenceSession(network.data, options, providers=["CPUExecutionProvider"])


@final
class _OpenVINO:
    fixed = True

    @staticmethod
    def session(network: Compiled, arrays: Arrays, threads: int) -> Session:
        core = package("openvino", "openvino").Core()
        model = _OpenVINO.read(network)
        model.reshape({name: value.shape for name, value in arrays.items()})
        # Without the hint a processor that has bfloat16 computes in it.
        hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}
        request, lock = core.compile_model(model, "CPU", hints).create_infer_request(), threading.Lock()

        def run(inputs: Arrays) -> NDArray[Any]:
            with lock:  # a request serves one caller at a time
                return np.array(request.infer(inputs)[0])

        return run

    @staticmethod
    def describe(network: Compiled) -> tuple[list[str], str | None]:
        model = _OpenVINO.read(network)
        places = ([KEY], ["framework", KEY])  # of its own files, and of those of ONNX
        text = next((str(model.get_rt_info(place).value) for place in places if model.has_rt_info(place)), None)
        return [entry.get_any_name() for entry in model.inputs], text

    @staticmethod
    def read(network: Compiled) -> Any:
        """The network as OpenVINO's model."""
        core = package("openvino", "openvino").Core()
        return core.read_model(network.data, network.weights) if network.weights else core.read_model(network.data)


def openvino_model(network: Compiled) -> Any:
    """The network as OpenVINO's model, to be changed."""
    return _OpenVINO.read(network)


def read_files(runtime: Runtime, path: Path) -> Compiled:
    """The network in a file: .onnx, or .xml with its weights in .bin beside it."""
    beside = path.with_suffix(".bin")
    try:
        weights = beside.read_bytes() if path.suffix.lower() == ".xml" else b""
        return Compiled(runtime, path.read_bytes(), weights, origin=path.name)
    except FileNotFoundError as error:
        raise InputError(f"There is no file {error.filename}; OpenVINO writes .xml and .bin side by side.") from error


RUNTIMES: Final[dict[Runtime, type[_ONNX] | type[_OpenVINO]]] = {"onnx": _ONNX, "openvino": _OpenVINO}

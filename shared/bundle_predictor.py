"""The predictor of a program's checkpoint: a class in the program's own bundle.

    class Predictor:
        inputs = {"image": ("FP32", [1, 28, 28])}      # by name: a datatype and the shape of a row
        outputs = {"logits": ("FP32", [10])}

        def __init__(self, checkpoint_dir: str): ...
        def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]: ...

B = rows of the batch, along the first axis of every array. Only processes that may run users' code make one: replicas,
and the workers of a prediction over a version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.checkpoint.format import ProgramContent
from shared.code_bundle_registry import entry_failed, find_entry
from shared.errors import FailedPrecondition, MillraceError

Array = NDArray[Any]

SCRIPT_SUFFIX = ".py"
DEFAULT_NAME = "Predictor"
MAX_TENSORS = 100
MAX_DIMENSIONS = 8
# A size that each batch chooses.
FREE = -1
# The end of the name of a tensor that says which rows of another are null.
NULLS = ".null"
# The datatypes of the Open Inference Protocol, and the NumPy types of their arrays in memory.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": "?",
        "UINT8": "u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP16": "<f2",
        "FP32": "<f4",
        "FP64": "<f8",
        "BF16": "<f4",
        "BYTES": "O",
    }.items()
}


@dataclass(frozen=True)
class DeclaredTensor:
    """An input or output that a predictor declares. `shape` is that of one row, with `FREE` for a size left open."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.datatype]

    def fits(self, array: Array, count: int) -> bool:
        """Return whether the shape of `array` is that of `count` rows."""
        return array.shape[:1] == (count,) and self.takes(array.shape[1:])

    def takes(self, row_shape: tuple[int, ...]) -> bool:
        return len(row_shape) == len(self.shape) and all(
            want in (FREE, size) for want, size in zip(self.shape, row_shape, strict=True)
        )


def entry_of(content: ProgramContent, entry: str) -> str:
    """Return the entry of the predictor: `entry`, or if it is empty `Predictor` of the program's own module.

    Raises `FailedPrecondition` (BAD_PREDICTOR) for a script, which would run from its first line.
    """
    if not entry and content.entry.endswith(SCRIPT_SUFFIX):
        raise FailedPrecondition(
            f"{content.entry} of {content.code_bundle} is a script, which would run from its first line: name a "
            f"predictor in a module beside it, as module:{DEFAULT_NAME}",
            reason="BAD_PREDICTOR",
            metadata={"resource": content.code_bundle, "entry": content.entry},
        )
    return entry or f"{content.entry.partition(':')[0]}:{DEFAULT_NAME}"


class BundlePredictor:
    """A predictor of a loaded bundle.

    Not safe for several threads.
    """

    def __init__(self, content: ProgramContent, entry: str, checkpoint_dir: Path) -> None:
        """`entry` is `module:name`; empty: `Predictor` of the program's own module.

        The bundle's code must be loaded. Raises `FailedPrecondition`, naming the user's line, for a class that cannot
        be instantiated, and BAD_PREDICTOR for one that does not declare its inputs and outputs.
        """
        self._bundle = content.code_bundle
        self._entry = entry_of(content, entry)
        made = find_entry(self._bundle, self._entry)
        self._made = self._called(lambda: made(str(checkpoint_dir)))
        if not callable(getattr(self._made, "predict", None)):
            raise self.refusal("has no method predict(inputs)")
        self.inputs, self.outputs = self._tensors("inputs"), self._tensors("outputs")

    @property
    def made(self) -> Any:
        """The user's object."""
        return self._made

    def predict(self, values: Mapping[str, Array], count: int) -> list[Array]:
        """Return the outputs for `count` rows, in the order in which they are declared.

        Raises `FailedPrecondition`.
        """
        # A copy: a predictor may write to its inputs, and the same rows may be tried again.
        given = {name: np.array(value, order="C") for name, value in values.items()}
        answer = self._called(lambda: self._made.predict(given))
        if not isinstance(answer, Mapping):
            raise self.refusal(f"predict returned a {type(answer).__name__} instead of a dict of arrays by name")
        return [self._output(output, answer, count) for output in self.outputs]

    def refusal(self, what: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"{self._entry} of {self._bundle} {what}",
            reason="BAD_PREDICTOR",
            metadata={"resource": self._bundle, "entry": self._entry},
        )

    def _output(self, declared: DeclaredTensor, answer: Mapping[Any, Any], count: int) -> Array:
        if declared.name not in answer:
            raise self.refusal(f"predict returned {', '.join(map(str, answer))}, and not the output {declared.name!r}")
        wanted = declared.dtype
        try:
            array = np.asarray(answer[declared.name])
            array = array.astype(wanted, copy=False, casting="unsafe" if wanted.kind == "O" else "same_kind")
        except (TypeError, ValueError) as error:
            raise self.refusal(f"output {declared.name!r} is not {declared.datatype}: {error}") from error
        if not declared.fits(array, count):
            raise self.refusal(
                f"output {declared.name!r} has the shape {list(array.shape)} instead of {[count, *declared.shape]}"
            )
        return array

    def _tensors(self, attribute: str) -> tuple[DeclaredTensor, ...]:
        declared = getattr(self._made, attribute, None)
        if not isinstance(declared, Mapping) or not 1 <= len(declared) <= MAX_TENSORS:
            raise self.refusal(f'needs {attribute}, e.g. {attribute} = {{"image": ("FP32", [1, 28, 28])}}')
        return tuple(self._tensor(attribute, name, one) for name, one in declared.items())

    def _tensor(self, attribute: str, name: Any, one: Any) -> DeclaredTensor:
        if not isinstance(name, str) or not name or name.endswith(NULLS):
            raise self.refusal(f"{attribute}: {name!r} is no name of a tensor")
        try:
            kind, shape = one
            sizes = tuple(FREE if size in (None, FREE) else int(size) for size in shape)
        except (TypeError, ValueError):
            raise self.refusal(
                f"{attribute}[{name!r}] is {one!r}, and no pair of a datatype and a row's shape"
            ) from None
        if len(sizes) >= MAX_DIMENSIONS or any(size < 1 and size != FREE for size in sizes):
            raise self.refusal(f"{attribute}[{name!r}]: {list(sizes)} is no shape of a row")
        return DeclaredTensor(name, self._datatype(attribute, name, kind), sizes)

    def _datatype(self, attribute: str, name: str, kind: Any) -> str:
        if isinstance(kind, str) and kind in DTYPES:
            return kind
        try:
            found = datatype_of(np.dtype(kind))
        except TypeError:
            found = None
        if found is None:
            raise self.refusal(
                f"{attribute}[{name!r}]: {kind!r} is none of {', '.join(DTYPES)}, nor a dtype of NumPy's"
            )
        return found

    def _called(self, call: Callable[[], Any]) -> Any:
        """Call the user's code, which may raise anything, SystemExit too."""
        try:
            return call()
        except (KeyboardInterrupt, MillraceError):
            raise
        except BaseException as error:
            raise entry_failed(self._bundle, self._entry, error) from error


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Return the datatype of these numbers; None if the protocol has none."""
    little = dtype.newbyteorder("<")
    exact = (name for name, one in DTYPES.items() if one == little and name not in ("BF16", "BYTES"))
    return next(exact, None)

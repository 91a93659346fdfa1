"""Reading and writing the files of a Hugging Face checkpoint."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from jaxdl.errors import CheckpointError
from jaxdl.models.huggingface.names import Array, canonical

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_FLOATING = ("F64", "F32", "F16", "BF16")


class Stored:
    """An array of a file, which stays there until it is read.

    Attributes:
        path: The file.
        name: In the file.
        shape: Of the array.
    """

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self.path, self.name, self._file = path, name, file
        part = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(part.get_shape())
        self._dtype = str(part.get_dtype())

    def read(self) -> Array:
        """Gives the array as float32.

        Raises:
            CheckpointError: It is not of a floating-point dtype, or holds values that are not finite.
        """
        if self._dtype not in _FLOATING:
            raise CheckpointError(
                f"model.weights: {self.path} holds {self.name} in {self._dtype}, which is no weight"
            )
        with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused
            array: Array = np.asarray(self._file.get_tensor(self.name)).astype(np.float32, copy=False)
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"model.weights: {self.path} holds values in {self.name} that are not finite"
            )
        return array


Weights = Mapping[str, Stored]
"""The arrays of a checkpoint by canonical name."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: The file cannot be read or is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"model.weights: {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"model.weights: {path} is damaged or no JSON file ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"model.weights: {path} is damaged: it holds no JSON object")
    return content


def open_weights(stack: contextlib.ExitStack, directory: Path) -> dict[str, Stored]:
    """Opens the weights of a directory, in one file or several.

    Args:
        stack: Closes the files; arrays can be read until then.
        directory: With model.safetensors, or its parts and their index.

    Returns:
        The arrays by canonical name.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    stored: dict[str, Stored] = {}
    for path, names in _files(directory).items():
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="np"))
            arrays = [Stored(path, file, name) for name in (file.keys() if names is None else names)]
        except OSError as error:
            # As in `jaxdl.models.torch_weights`.
            why = "it is a directory" if path.is_dir() else error.strerror or str(error).partition(":")[0]
            raise CheckpointError(f"model.weights: {path} cannot be read ({why})") from error
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"model.weights: {path} is damaged ({error})") from error
        for array in arrays:
            other = stored.setdefault(canonical(array.name), array)
            if other is not array:
                raise CheckpointError(
                    f"model.weights: {path} holds one weight twice, as {other.name} and {array.name}"
                )
    return stored


def _files(directory: Path) -> dict[Path, list[str] | None]:
    """The files with weights and the names to read of each; None: all."""
    if (directory / WEIGHTS).exists():
        return {directory / WEIGHTS: None}
    index = directory / INDEX
    if not index.exists():
        if (directory / _PICKLED).exists():
            raise CheckpointError(
                f"model.weights: {directory} holds {_PICKLED}, and such a file can run programs. To convert: "
                f"safetensors.torch.save_file({{k: v.clone() for k, v in torch.load('{_PICKLED}', "
                f"weights_only=True).items()}}, '{WEIGHTS}', {{'format': 'pt'}})"
            )
        raise CheckpointError(f"model.weights: {directory} holds neither {WEIGHTS} nor {INDEX}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in places.values()
    ):
        raise CheckpointError(f"model.weights: {index} is damaged: it has no weight_map of names and files")
    files: dict[Path, list[str] | None] = {}
    for name, file in places.items():
        names = files.setdefault(directory / file, [])
        assert names is not None  # only a file without index has no names
        names.append(name)
    return files


def write_files(directory: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Writes all files under other names, and then gives them theirs.

    Args:
        directory: Made if there is none.
        files: What writes a file to a path, by the file's name.

    Raises:
        CheckpointError: They cannot be written.
    """
    temporary = {name: directory / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, write in files.items():
            write(temporary[name])
            temporary[name].chmod(0o644)  # the safetensors library lets nobody else read its file
            with temporary[name].open("rb") as written:
                os.fsync(written.fileno())
        for name, path in temporary.items():
            path.replace(directory / name)
    except (OSError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{directory} cannot be written ({why})") from error
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                path.unlink()

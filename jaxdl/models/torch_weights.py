"""Published weights: files in torchvision's layout become the variables of `jaxdl.models.resnet`."""

import logging
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxdl.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_STEM = {"conv": "conv1", "norm": "bn1"}
_SHORTCUT = {"conv_shortcut": "downsample.0", "norm_shortcut": "downsample.1"}
_HEAD = {"fc.weight", "fc.bias"}
_COUNTER = ".num_batches_tracked"  # PyTorch's batch normalisation counts; ours does not

_Shapes = Mapping[str, tuple[int, ...]]


def load_torch_weights(path: Path, variables: Any) -> Any:
    """Fills the variables of a ResNet with the weights of a file.

    Every array of the file must have its place and every variable its array. The one exception is a head for
    another number of classes: it is left as it was given, and a warning says so.

    Usage:
        variables = jax.eval_shape(lambda: nn.unbox(model.init(key, images, train=False)))
        variables = load_torch_weights(Path("resnet50.safetensors"), variables)

    Args:
        path: An .npz file, or else one in the safetensors format.
        variables: `params` and `batch_stats`, as flax's dict or as a pair, of arrays or of their
            `jax.ShapeDtypeStruct`s.

    Returns:
        The same tree with NumPy arrays of the same shapes and dtypes; what is left as it was given is the
        given leaf.

    Raises:
        CheckpointError: The file cannot be read, or holds values that are not finite.
        ConfigError: The weights are those of another architecture.
    """
    arrays = _read(path)
    leaves, structure = jax.tree_util.tree_flatten_with_path(variables)
    wanted = {_torch_name([key.key for key in keys[1:]]): leaf for keys, leaf in leaves}
    found_shapes = {name: array.shape for name, array in arrays.items()}
    shapes = {name: _torch_shape(leaf.shape) for name, leaf in wanted.items()}
    left = _HEAD if _differ_in_classes_only(found_shapes, shapes) else set()
    _check_fit(path, _without(left, found_shapes), _without(left, shapes))
    if left:
        _log.warning(
            "%s tells %d classes apart and this model %d: its last layer starts from random values",
            path,
            *found_shapes["fc.bias"],
            *shapes["fc.bias"],
        )

    filled = {
        name: leaf if name in left else _from_torch(arrays[name], leaf.dtype) for name, leaf in wanted.items()
    }
    bad = [name for name, array in _without(left, filled).items() if not np.isfinite(array).all()]
    if bad:
        raise CheckpointError(
            f"{path} holds values that are not finite, or too large for the dtype of the parameters, in "
            f"{len(bad)} arrays ({_list(bad)}): take another file."
        )
    return jax.tree_util.tree_unflatten(structure, filled.values())


def _read(path: Path) -> dict[str, np.ndarray]:
    """Reads all arrays but the counters."""
    npz = path.suffix.lower() == ".npz"
    try:
        if npz:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name]) for name in file.files}
        else:
            arrays = safetensors.numpy.load_file(path)
    except OSError as error:
        # The safetensors library tells the system's error in the text only, and maps what cannot be mapped.
        why = "it is a directory" if path.is_dir() else error.strerror or str(error).partition(":")[0]
        raise CheckpointError(f"model.weights: {path} cannot be read ({why}).") from error
    except (
        safetensors.SafetensorError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"model.weights: {path} is damaged or no {'.npz' if npz else 'safetensors'} file ({error}). To "
            "convert what PyTorch saved: safetensors.torch.save_file(torch.load('x.pth'), 'x.safetensors')."
        ) from error
    arrays = {name: array for name, array in arrays.items() if not name.endswith(_COUNTER)}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise CheckpointError(f"model.weights: {path} holds {name} in {array.dtype}, which is no weight.")
    return arrays


def _torch_name(keys: list[str]) -> str:
    """`layer1_0 conv1 kernel` is `layer1.0.conv1.weight` there."""
    layer, *module, leaf = keys
    if layer == "head":
        prefix = "fc"
    elif layer == "stem":
        prefix = _STEM[module[0]]
    else:
        part = _SHORTCUT.get(module[0]) or module[0].replace("norm", "bn")
        prefix = f"{layer.replace('_', '.')}.{part}"
    return f"{prefix}.{_LEAVES[leaf]}"


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Kernels are HWIO or IO here, OIHW or OI there."""
    return (shape[3], shape[2], *shape[:2]) if len(shape) == 4 else shape[::-1]


def _from_torch(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    axes = (2, 3, 1, 0) if array.ndim == 4 else range(array.ndim)[::-1]
    with np.errstate(over="ignore"):  # what does not fit into float16 becomes infinite and is refused
        return array.transpose(axes).astype(dtype, order="C")


def _differ_in_classes_only(found: _Shapes, wanted: _Shapes) -> bool:
    """Whether both have a head, and the same one but for the number of classes."""
    if not found.keys() >= _HEAD:
        return False
    (classes, features), other = wanted["fc.weight"], found["fc.bias"]
    return other != (classes,) and len(other) == 1 and found["fc.weight"] == (*other, features)


def _check_fit(path: Path, found: _Shapes, wanted: _Shapes) -> None:
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unknown": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {_shape(found[name])}, in the model {_shape(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind} ({_list(names)})" for kind, names in problems.items() if names)
        raise ConfigError(
            f"model.weights: {path} does not fit the model: {told}. The model has {len(wanted)} arrays, the "
            f"file {len(found)}. Set model.name and model.stem to what the weights were trained with."
        )


def _without(left: set[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in left}


def _list(names: Iterable[str]) -> str:
    first, *rest = names
    return ", ".join([first, *rest[:2], *(["..."] if len(rest) > 2 else [])])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"

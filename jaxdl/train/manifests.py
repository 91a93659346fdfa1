"""The manifest of a checkpoint: what is in it, and a digest of every file, by which damage is found.

Orbax restores a file with flipped bytes to wrong values in silence.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdl.errors import CheckpointError
from jaxdl.train.rundir import replace_file, sync_directory

FORMAT = 1
NAME = "manifest.json"
_LISTED = 20  # leaves named in one message


class DamagedError(Exception):
    """A checkpoint is not what was written; the text names the file."""


def describe(leaf: Any) -> dict[str, Any]:
    """Returns dtype and shape of an array, concrete or abstract, as JSON values."""
    return {"dtype": leaf.dtype.name, "shape": list(leaf.shape)}


def write(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Digests all files of a finished checkpoint and writes its manifest; all of it is on the disk then."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as data:
            # The digest lets go of the GIL for every block, so training goes on.
            digest = hashlib.file_digest(data, "sha256").hexdigest()
            os.fsync(data.fileno())
            files[path.relative_to(directory).as_posix()] = {"size": data.tell(), "sha256": digest}
    for path in (path for path in directory.rglob("*") if path.is_dir()):
        sync_directory(path)
    replace(directory, {**manifest, "files": files})


def replace(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Writes a manifest, with its own digest, in place of the one there is, if any."""
    signed = {**manifest, "sha256": hashlib.sha256(_canonical(manifest)).hexdigest()}
    replace_file(directory / NAME, json.dumps(signed, indent=1).encode())


def _canonical(content: Mapping[str, Any]) -> bytes:
    """JSON as it is digested, whatever its layout in a file."""
    return json.dumps(content, sort_keys=True).encode()


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, held against its own digest."""
    file = path / NAME
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        stated = manifest.pop("sha256")
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file} is damaged") from error
    if stated != hashlib.sha256(_canonical(manifest)).hexdigest():
        raise DamagedError(f"{file} is damaged")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, and this version of jaxdl reads format {FORMAT}: "
            "use the version that wrote it."
        )
    if str(manifest["step"]) != path.name:
        raise DamagedError(f"{path} is a renamed checkpoint of step {manifest['step']}")
    return manifest


def score(path: Path) -> float | None:
    """Returns the score of a checkpoint, if it can be read and has one."""
    try:
        found: float | None = read(path)["score"]
    except (DamagedError, CheckpointError):
        return None
    return found


def verify_files(path: Path, files: Mapping[str, Any]) -> None:
    """Raises DamagedError if a file is not what the manifest says."""
    for name, expected in files.items():
        try:
            with (path / name).open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != expected["size"]:
                    raise DamagedError(f"{path / name} has {found} bytes instead of {expected['size']}")
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    raise DamagedError(f"{path / name} is damaged (its SHA-256 is not the recorded one)")
        except OSError as error:
            raise DamagedError(f"{path / name} cannot be read ({error.strerror})") from error


def require_same_leaves(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses a state of another kind; Orbax would cast types in silence."""

    def text(leaf: Mapping[str, Any]) -> str:
        return f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"

    expected = {name: describe(leaf) for name, leaf in wanted.items()}
    lines = [
        f"{name}: {text(stored[name])} in the checkpoint, {text(leaf)} expected"
        for name, leaf in expected.items()
        if name in stored and stored[name] != leaf
    ]
    lines += [f"{name}: {text(expected[name])} expected, missing" for name in expected if name not in stored]
    lines += [
        f"{name}: {text(stored[name])} in the checkpoint only" for name in stored if name not in expected
    ]
    if lines:
        if len(lines) > _LISTED:
            lines[_LISTED:] = [f"and {len(lines) - _LISTED} more"]
        raise CheckpointError(
            f"{path} holds the state of another configuration; go on with the one it was made with, "
            "or choose another --workdir:\n  " + "\n  ".join(lines)
        )

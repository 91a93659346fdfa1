"""Where text comes from: files of text, and the text sets of TensorFlow Datasets."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxdl.data.files import printable
from jaxdl.data.images.sources.records import version_directory
from jaxdl.data.parallel import OrderedMap, in_turn
from jaxdl.errors import ConfigError, DataError

Separation = Literal["file", "blank_line"]
"""What ends a document within text files: the end of the file, or also a blank line."""

_BOM = "\ufeff"


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a corpus.

    Attributes:
        name: what messages call the corpus.
        digest: hexadecimal; another where the corpus is another one.
        read: yields the documents, always in the same order, none of them blank; the map that it takes
            does what can be spread over processes.
    """

    name: str
    digest: str
    read: Callable[[OrderedMap], Iterator[str]] = field(repr=False)

    def __iter__(self) -> Iterator[str]:
        return self.read(in_turn)


def digest_of(parts: Iterable[object]) -> str:
    """Returns 32 hexadecimal digits of SHA-256 over the texts of all parts."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = str(part).encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little"))  # so that ("ab", "c") is not ("a", "bc")
        digest.update(encoded)
    return digest.hexdigest()[:32]


def open_files(path: Path, separation: Separation = "file") -> Documents:
    """Opens a file of UTF-8 text, or all `*.txt` files of a directory, at any depth, sorted.

    Hidden entries and links to directories are ignored. The digest is of names, sizes and times of
    change (the system's too, which no archive sets), so that it costs no reading.

    Args:
        path: file or directory.
        separation: what ends a document; BERT's own format has a blank line between documents.

    Raises:
        DataError: there is no such file, or none in the directory; from `read`: a file cannot be read,
            or is not UTF-8.
    """
    files = [path] if path.is_file() else sorted(_text_files(path))
    if not files:
        raise DataError(f"{printable(path)} has no .txt files")
    try:
        stats = [(file, file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"{printable(str(error.filename))} cannot be read: {error.strerror}") from error
    parts: list[object] = []
    for file, stat in stats:
        parts += [_relative(file, path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]

    def read(over: OrderedMap) -> Iterator[str]:
        del over  # reading a disk from several processes gains little
        for file in files:
            yield from _documents(_lines(file), separation)

    return Documents(printable(path), digest_of(["files", separation, *parts]), read)


def open_tfds_text(directory: Path, dataset: str, split: str, feature: str = "text") -> Documents:
    """Opens one feature of a text set that TFDS has prepared as array_record files; a record a document.

    Args:
        directory: of all data sets, or of one version.
        dataset: `name`, `name/configuration`, or either with `:version`.
        split: as `train` or `train[:90%]`.
        feature: name of the feature with the text.

    Raises:
        ConfigError: there is no such split or feature.
        DataError: the data set is missing, damaged or in other files; from `read`: a record is not
            UTF-8.
    """
    import tensorflow_datasets as tfds  # only this source needs it

    version = version_directory(directory, dataset)
    where = printable(version)
    try:
        builder = tfds.builder_from_directory(str(version))
        features, splits = dict(builder.info.features), builder.info.splits
    except Exception as error:  # a damaged description raises whatever its parser raises
        raise DataError(f"{where} is no readable TFDS data set ({error}): prepare it again") from error
    if not isinstance(features.get(feature), tfds.features.Text):
        names = ", ".join(features)
        raise ConfigError(f"data.feature {feature!r} is not a text of {where}; it has: {names}")
    try:
        files = [Path(file.filename) for file in splits[split].file_instructions]
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        records = builder.as_data_source(split, deserialize_method=raw)
        sizes = [file.stat().st_size for file in files]
    except (KeyError, ValueError) as error:
        names = ", ".join(splits)
        raise ConfigError(f"split {split!r} is not one of {where}; it has: {names}") from error
    except OSError as error:
        raise DataError(f"{where}: {error}: prepare the data set again") from error
    except NotImplementedError as error:
        raise DataError(f"{where} is not in array_record files: convert it") from error
    wanted = tfds.features.FeaturesDict({feature: features[feature]})

    def read(over: OrderedMap) -> Iterator[str]:
        del over
        for index in range(len(records)):
            try:
                text: str = wanted.deserialize_example_np(records[index])[feature].decode("utf-8")
            except Exception as error:  # the reader is C++ (RuntimeError), the parser is protobuf's
                raise DataError(f"{where} {split} record {index} cannot be read ({error})") from error
            if text.strip():
                yield text

    info = (version / "dataset_info.json").read_text("utf-8")
    parts = ["tfds", info, split, feature, *(file.name for file in files), *sizes]
    return Documents(f"{where} {split}", digest_of(parts), read)


def _text_files(directory: Path) -> Iterator[Path]:
    if not directory.is_dir():
        raise DataError(f"{printable(directory)} is no file or directory of text: set data.dir")

    def fail(error: OSError) -> None:
        name = printable(str(error.filename))
        raise DataError(f"{name} cannot be listed: {error.strerror}") from error

    for here, below, names in os.walk(directory, onerror=fail):
        below[:] = [name for name in below if not name.startswith(".")]
        wanted = (name for name in names if name.endswith(".txt") and not name.startswith("."))
        yield from (Path(here, name) for name in wanted)


def _relative(file: Path, root: Path) -> str:
    return file.name if file == root else file.relative_to(root).as_posix()


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file without loading it whole; a byte that is not UTF-8 is named."""
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                text = line.decode("utf-8")
                yield text.removeprefix(_BOM) if offset == 0 else text
                offset += len(line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{printable(path)} is not UTF-8 at byte {offset + error.start} ({error.reason}): "
            "convert it or remove it"
        ) from error
    except OSError as error:
        raise DataError(f"{printable(path)} cannot be read: {error.strerror}") from error


def _documents(lines: Iterable[str], separation: Separation) -> Iterator[str]:
    if separation == "file":
        groups: Iterable[list[str]] = [list(lines)]
    else:
        groups = _between_blank_lines(lines)
    for group in groups:
        text = re.sub(r"\r\n?", "\n", "".join(group))
        if text.strip():
            yield text


def _between_blank_lines(lines: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    for line in lines:
        if line.strip():
            group.append(line)
        else:
            yield group
            group = []
    yield group

"""English that every installation has: the manual within Python, and docstrings of what is installed.

About ten megabytes of technical prose. It is for tests, demonstrations and
measurements: it differs with the versions of Python and of the packages.
"""

import ast
import importlib.util
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from jaxdl.data.parallel import OrderedMap
from jaxdl.data.text.documents import Documents, digest_of

PACKAGES = (
    "numpy", "scipy", "sklearn", "jax", "flax", "optax", "orbax", "grain", "tensorflow_datasets",
    "matplotlib", "pydantic",
)  # fmt: skip
"""Packages whose docstrings are read, all of them needed by jaxdl; one that is absent is passed over."""

_FORMAT = 1  # counts changes in what is taken from the files
_SKIPPED = frozenset({"test", "tests", "site-packages", "dist-packages", "_vendor", "idlelib"})
_TOPICS = "pydoc_data/topics.py"
_PROSE = 0.8  # share of letters and spaces from which a paragraph is prose, not a table or code
_WORDS = 5  # below, it is a heading or a list of names


def open_embedded() -> Documents:
    """Opens Python's topics, a document each, and the docstrings of installed modules, one a module.

    Nothing is imported: the files are parsed. Of each text the paragraphs of prose are kept, and of
    equal paragraphs the first.
    """
    standard = Path(sysconfig.get_paths()["stdlib"])
    roots = [("python", standard), *((name, root) for name in PACKAGES for root in _locations(name))]
    files = [(name, inner, file) for name, root in roots for inner, file in _modules(root)]
    # By names and sizes: an installation's times say nothing of its content.
    sizes = [item for name, inner, file in files for item in (name, inner, file.stat().st_size)]
    # Kept, because training a vocabulary and tokenising each read everything, and parsing takes longest.
    kept: list[str] = []

    def read(over: OrderedMap) -> Iterator[str]:
        if not kept:
            seen: set[str] = set()
            found: list[str] = []
            for texts in over(texts_of, [file for _, _, file in files]):
                for text in texts:
                    # By a dictionary, as a text may repeat itself too.
                    fresh = [part for part in dict.fromkeys(paragraphs(text)) if part not in seen]
                    seen.update(fresh)
                    if fresh:
                        found.append("\n\n".join(fresh))
            kept.extend(found)
        yield from kept

    return Documents(
        "embedded English", digest_of(["embedded", _FORMAT, platform.python_version(), *sizes]), read
    )


def texts_of(path: Path) -> list[str]:
    """Returns the documents of a module: its docstrings as one, or each topic of Python's manual.

    A file that this Python cannot parse has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escape sequences
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    if path.as_posix().endswith(_TOPICS):
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return [text for text in constants if isinstance(text, str) and len(text) > 200]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    text = "\n\n".join(docstring for docstring in found if docstring)
    return [text] if text else []


def paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of prose in a text, each on one line."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        letters = sum(map(str.isalpha, joined)) + joined.count(" ")
        prose = letters >= _PROSE * len(joined) and joined.count(" ") >= _WORDS - 1
        if prose and ">>>" not in joined:
            kept.append(joined)
    return kept


def _locations(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)  # of a top-level name: finds it without running it
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _modules(root: Path) -> list[tuple[str, Path]]:
    """Returns the modules below a directory, without tests, in the order of their paths within it."""
    found = []
    for path in root.rglob("*.py"):
        inner = path.relative_to(root)
        if not _SKIPPED.intersection(inner.parts):
            found.append((inner.as_posix(), path))
    return sorted(found)

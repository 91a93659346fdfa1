"""A vocabulary made from a corpus: by the same corpus always the same one, kept on disk."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxdl.data.files import printable, replacing
from jaxdl.data.parallel import OrderedMap
from jaxdl.data.text.documents import Documents, digest_of
from jaxdl.data.text.wordpiece import CONTINUES, SPECIAL, WordPiece, from_vocabulary, load, normalizer
from jaxdl.errors import DataError

_FORMAT = 1  # counts changes of the way to train
_CHARACTERS = 1000  # in the alphabet, as in the library; rarer ones are [UNK]


def train(read: Callable[[], Iterable[str]], *, size: int, lowercase: bool) -> WordPiece:
    """Makes a vocabulary: characters, then the most frequent pairs of pieces merged again and again.

    That is byte-pair encoding (Sennrich et al. 2015) with WordPiece's marks, which is what the
    `tokenizers` library trains. A word is then split by the longest match, as in BERT.

    Args:
        read: gives the documents of the corpus, and the same ones again: it is called twice.
        size: pieces to make, special tokens included; a small corpus gives fewer.
        lowercase: as for `from_vocabulary`.

    Returns:
        The tokenizer; special tokens have the numbers 0 to 4.

    Raises:
        DataError: the corpus has no text, or so many characters that `size` does not hold them.
    """
    clean = normalizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for document in read():
        counts.update(clean.normalize_str(document))
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    alphabet = sorted([character for character, _ in frequent if not character.isspace()][:_CHARACTERS])
    if not alphabet:
        raise DataError("the corpus has no text to make a vocabulary of")
    first = [*SPECIAL, *alphabet, *(CONTINUES + c for c in alphabet)]
    if size < len(first):
        raise DataError(
            f"a vocabulary of {size} pieces does not hold the corpus's {len(alphabet)} characters: "
            f"set data.vocabulary_size to at least {len(first)}"
        )
    # The library numbers the pieces "##x" in the order of a hash table, another in each run, and breaks
    # ties between pairs by these numbers. Given them as special tokens, in our order, it is
    # deterministic.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(map(clean.normalize_str, read()), trainer)
    vocabulary = tokenizer.get_vocab()
    return from_vocabulary(sorted(vocabulary, key=vocabulary.__getitem__), lowercase=lowercase)


def trained(
    documents: Documents, directory: Path, over: OrderedMap, *, size: int, lowercase: bool
) -> WordPiece:
    """Returns the vocabulary of `train` from `directory`, where it is made if it is not there.

    Raises:
        DataError: as `train`; the directory cannot be written.
    """
    key = digest_of(["vocabulary", _FORMAT, documents.digest, size, lowercase])
    path = directory / f"vocabulary-{key}.json"
    with contextlib.suppress(DataError):  # absent, or damaged: JSON that is cut off is no JSON
        return load(path, lowercase=lowercase)
    tokenizer = train(lambda: documents.read(over), size=size, lowercase=lowercase)
    try:
        with replacing(path) as written:
            written.write_text(tokenizer.serialized, "utf-8")
    except OSError as error:
        raise DataError(
            f"{printable(directory)} cannot be written ({error.strerror}): set data.cache"
        ) from error
    return tokenizer

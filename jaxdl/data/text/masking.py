"""Masked language modelling (Devlin et al. 2018): tokens to predict, and what is put in their place."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.text.wordpiece import WordPiece
from jaxdl.data.types import Batch

_MASKED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are


@dataclass(frozen=True, eq=False)
class Masking:
    """Chooses tokens for prediction and hides them.

    Attributes:
        special: bool [V]; numbers that are never chosen and never put in place of another.
        starts: bool [V]; numbers with which a word starts.
        mask: number of [MASK].
        ordinary: int64 [O], the numbers that are not special.
        share: share of the tokens that are text to choose.
        limit: the most tokens to choose in a sequence, P.
        whole_words: choose all pieces of a word or none.
    """

    special: NDArray[np.bool_]
    starts: NDArray[np.bool_]
    mask: int
    ordinary: NDArray[np.int64]
    share: float
    limit: int
    whole_words: bool

    @classmethod
    def of(cls, tokenizer: WordPiece, *, share: float, limit: int, whole_words: bool) -> "Masking":
        """Makes the masking for a tokenizer's vocabulary."""
        special, starts = tokenizer.special, tokenizer.starts
        ordinary = np.flatnonzero(~special)
        return cls(special, starts, tokenizer.mask, ordinary, share, limit, whole_words)

    def __call__(self, example: Batch, rng: np.random.Generator) -> Batch:
        """Hides some tokens of a sequence.

        Of the tokens that are text, `share` are chosen, at least one and at most `limit`: not padding
        (`segment` 0), special tokens or unknown pieces. Of the chosen, 80% become [MASK], 10% a random
        token and 10% stay, each by a draw of its own. A sequence without text has weight 0 everywhere.

        Args:
            example: `word` and `segment`, int32 [L], and more, which passes through.
            rng: decides everything.

        Returns:
            The example with another `word`, and three arrays with a place for each prediction, those in
            use first: `masked_position` int32 [P], ascending places in the sequence; `masked_word` int32
            [P], what was there, any number, 0 among them; `masked_weight` float32 [P], 1, and 0 on
            unused places.
        """
        word = example["word"]
        text = (example["segment"] > 0) & ~self.special[word]
        places = np.flatnonzero(text)
        number = min(self.limit, max(1, round(self.share * len(places)))) if len(places) else 0
        if self.whole_words:
            chosen = np.sort(self._words(word, places, number, rng))
        else:
            chosen = np.sort(rng.permutation(places)[:number])
        count = len(chosen)

        hidden = word.copy()
        draw = rng.random(count)
        replaced = self.ordinary[rng.integers(len(self.ordinary), size=count)] if count else chosen
        hidden[chosen] = np.where(
            draw < _MASKED, self.mask, np.where(draw < _MASKED + _RANDOM, replaced, word[chosen])
        )
        position, label = np.zeros(self.limit, np.int32), np.zeros(self.limit, np.int32)
        weight = np.zeros(self.limit, np.float32)
        position[:count], label[:count], weight[:count] = chosen, word[chosen], 1
        masked = {"masked_position": position, "masked_word": label, "masked_weight": weight}
        return example | {"word": hidden} | masked

    def _words(
        self, word: NDArray[np.int32], places: NDArray[np.int64], number: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Chooses whole words in random order, passing over one that would be more than `number` tokens.

        Where each word has more, the shortest is chosen, if `limit` allows for it.
        """
        if not len(places):
            return places
        apart = np.diff(places, prepend=-2) > 1  # a special token lies between
        bounds = np.append(np.flatnonzero(self.starts[word[places]] | apart), len(places))
        sizes = np.diff(bounds)
        taken: list[int] = []
        left = number
        for index in rng.permutation(len(sizes)).tolist():
            if sizes[index] <= left:
                taken.append(index)
                left -= int(sizes[index])
                if not left:
                    break
        shortest = int(sizes.argmin())
        if not taken and sizes[shortest] <= self.limit:
            taken = [shortest]
        words = [places[bounds[index] : bounds[index + 1]] for index in taken]
        return np.concatenate([places[:0], *words])

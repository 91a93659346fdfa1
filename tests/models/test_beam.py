"""Beam search against a search through everything, and against the same search in plain Python."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.models.beam import beam_search

START, END, ROWS = 9, 1, 997


class Table:
    """A made-up model: the logits of the next word are a row of a table, drawn by a hash of the prefix."""

    def __init__(self, words: int, seed: int):
        rng = np.random.default_rng(seed)
        self.words = words
        self.logits = rng.normal(size=(ROWS, words)).astype(np.float32) * 2
        exact = self.logits.astype(np.float64)
        self.chances = exact - np.log(np.exp(exact).sum(-1, keepdims=True))

    @staticmethod
    def mixed(state, token):
        """Below 2^31 for any of the numbers here."""
        return (state * 31 + token * 17 + 5) % 65_521

    def step(self, cache, token, position):
        state = self.mixed(cache["state"], token)
        # The rows are reordered whatever their shape; and each hypothesis is as old as it should be.
        tokens = cache["tokens"].at[:, position].set(token)
        return jnp.asarray(self.logits)[state % ROWS], {"state": state, "tokens": tokens}

    def next(self, first: int, prefix: tuple[int, ...]) -> np.ndarray:
        """Log-probabilities, float64 [words], of the word after a prefix."""
        state = first
        for token in (START, *prefix):
            state = self.mixed(state, token)
        return self.chances[state % ROWS]

    def search(self, firsts, *, beam, length, alpha, jit=True):
        """One example for each number that its hashes begin with."""
        state = jnp.repeat(jnp.asarray(firsts, jnp.int32), beam)
        cache = {"state": state, "tokens": jnp.zeros((len(state), length), jnp.int32)}
        settings = {"beam": beam, "length": length, "start": START, "end": END, "alpha": alpha}
        search = partial(beam_search, self.step, batch=len(firsts), **settings)
        tokens, scores = (jax.jit(search) if jit else search)(cache)
        assert (tokens.dtype, tokens.shape) == (jnp.int32, (len(firsts), beam, length))
        assert (scores.dtype, scores.shape) == (jnp.float32, (len(firsts), beam))
        return np.asarray(tokens), np.asarray(scores)


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def everything(table: Table, first: int, length: int, alpha: float):
    """All sequences that end, with their scores, best first."""
    others = [word for word in range(table.words) if word != END]
    found = []
    for count in range(length):
        for body in itertools.product(others, repeat=count):
            whole = (*body, END)
            chance = sum(table.next(first, whole[:i])[whole[i]] for i in range(len(whole)))
            found.append((chance / penalty(len(whole), alpha), whole))
    return sorted(found, reverse=True)


def plain(table: Table, first: int, beam: int, length: int, alpha: float):
    """The same search for one example, without an early end."""
    alive, ended = [(0.0, ())], []
    for position in range(length):
        continued = [
            (chance + more, (*prefix, word))
            for chance, prefix in alive
            for word, more in enumerate(table.next(first, prefix))
            if word == END or position < length - 1
        ]
        best = sorted(continued, reverse=True)[:beam]
        ended += [(chance / penalty(len(x), alpha), x) for chance, x in best if x[-1] == END]
        alive = [(chance, x) for chance, x in best if x[-1] != END]
    return sorted(ended, reverse=True)[:beam]


def assert_found(tokens, scores, expected):
    """Results of one example are these, and after them there is nothing."""
    length = tokens.shape[1]
    for row, score, (expected_score, whole) in zip(tokens, scores, expected, strict=False):
        assert tuple(row) == whole + (0,) * (length - len(whole))
        np.testing.assert_allclose(score, expected_score, rtol=1e-5)
    assert np.all(scores[len(expected) :] == -np.inf)
    assert np.all(tokens[len(expected) :] == 0)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_what_a_search_through_everything_finds(seed, alpha):
    table, firsts, length = Table(4, seed), [3, 1000, 77], 4
    tokens, scores = table.search(firsts, beam=45, length=length, alpha=alpha)
    for first, *found in zip(firsts, tokens, scores, strict=True):
        expected = everything(table, first, length, alpha)
        assert len(expected) == 40  # 5 places are left
        assert_found(*found, expected)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_a_narrow_beam_is_the_search_written_plainly(beam, alpha):
    firsts = list(range(5, 500, 45))
    for seed in range(3):
        table = Table(7, seed)
        tokens, scores = table.search(firsts, beam=beam, length=9, alpha=alpha)
        for first, *found in zip(firsts, tokens, scores, strict=True):
            assert_found(*found, plain(table, first, beam, 9, alpha))


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_one_hypothesis_takes_the_likeliest_word_each_time(alpha):
    table, firsts, length = Table(7, 5), list(range(20)), 8
    tokens, _ = table.search(firsts, beam=1, length=length, alpha=alpha)
    ends = set()
    for first, row in zip(firsts, tokens[:, 0], strict=True):
        prefix = ()
        while END not in prefix:
            last = len(prefix) == length - 1
            prefix += (END if last else int(table.next(first, prefix).argmax()),)
        assert tuple(row) == prefix + (0,) * (length - len(prefix))
        ends.add(len(prefix))
    assert len(ends) > 3


def test_examples_do_not_depend_on_each_other():
    table, firsts = Table(7, 6), [1, 2, 3, 40, 500]
    together = table.search(firsts, beam=3, length=12, alpha=0.6)
    for i, first in enumerate(firsts):
        alone = table.search([first], beam=3, length=12, alpha=0.6)
        for one, all_ in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_[i])


def test_the_cache_follows_its_hypothesis():
    """The best hypotheses by what the model has read are those that the search has written."""
    table, seen = Table(7, 7), []
    step = table.step

    def watched(cache, token, position):
        logits, cache = step(cache, token, position)
        seen.append(np.asarray(cache["tokens"]))
        return logits, cache

    table.step = watched
    with jax.disable_jit():
        tokens, _ = table.search([11], beam=3, length=6, alpha=0.6, jit=False)
    for row in tokens[0]:
        read = [START, *row[: np.argmax(row == END)]]
        place = len(read) - 1
        assert read in seen[place][:, : place + 1].tolist()


@pytest.mark.parametrize(("alpha", "steps"), [(0.0, 2), (2.0, 7)])
def test_a_search_is_over_when_nothing_can_win_any_more(alpha, steps):
    """After the first word, `END` has 0.6 and word 2 has 0.4; after word 2, `END` is nearly sure.

    So both hypotheses have ended with the second token, and one is alive, with 0.4 x 1e-3. With alpha 0
    that is the end. With alpha 2 it could still win if the rest were free: up to the 7th token, which
    makes its chance 0.4 x 1e-18, whose logarithm, -42.4, by the penalty of 40 tokens, 56.3, is less than
    log(0.4) by that of 2.
    """
    calls = []

    def step(cache, token, position):
        calls.append(int(position))
        chances = [0.0, 0.6, 0.4] if position == 0 else [1e-3, 0.999, 0.0]
        return jnp.log(jnp.asarray([chances] * 2, jnp.float32)), cache

    with jax.disable_jit():
        tokens, scores = beam_search(step, {}, batch=1, beam=2, length=40, start=0, end=END, alpha=alpha)
    assert tokens[0, :, :2].tolist() == [[END, 0], [2, END]]
    expected = [np.log(0.6), np.log(0.4 * 0.999) / (7 / 6) ** alpha]
    np.testing.assert_allclose(scores[0], expected, rtol=1e-5)
    assert len(calls) == steps


@pytest.mark.parametrize("wrong", [{"alpha": -0.1}, {"beam": 0}, {"length": 0}])
def test_what_makes_no_sense_is_refused(wrong):
    settings = {"batch": 1, "beam": 2, "length": 3, "start": 0, "end": END}
    with pytest.raises(ValueError, match="beam search needs"):
        beam_search(lambda *_: None, {}, **(settings | wrong))

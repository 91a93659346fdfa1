"""Beam search: the likeliest sequences of a model that tells the next word's probabilities.

With the length penalty of Wu et al. 2016, "Google's Neural Machine Translation System"
(https://arxiv.org/abs/1609.08144), equation 14. Nothing here knows the model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""`(cache, token, position) -> (logits, cache)`: reads the token at a position of each hypothesis, int32
[batch * beam], and gives the logits of the next, float32 [batch * beam, words]. `cache` is whatever the
model keeps of the tokens before, a tree of arrays [batch * beam, ...]; the search reorders its rows."""


class _Beam(NamedTuple):
    """Where a search stands.

    Attributes:
        position: Tokens that the hypotheses have.
        alive: Tokens of those that go on, int32 [batch, beam, length].
        chances: Their log-probabilities, float32 [batch, beam]; -inf where there is none.
        ended: Tokens of the best that have ended, like `alive`.
        scores: Their scores, best first; -inf where there is none.
        cache: The model's.
    """

    position: jax.Array
    alive: jax.Array
    chances: jax.Array
    ended: jax.Array
    scores: jax.Array
    cache: Any


def beam_search(
    step: Step,
    cache: Any,
    *,
    batch: int,
    beam: int,
    length: int,
    start: int,
    end: int,
    alpha: float = 0.6,
) -> tuple[jax.Array, jax.Array]:
    """Searches for the sequences of the highest scores among all that end within `length` tokens.

    The score of a sequence of n tokens, of which the last and no other is `end`, is its log-probability
    divided by ((5 + n) / 6)^alpha.

    At each position, the `beam` likeliest continuations of the hypotheses that are alive are chosen.
    Those that end are kept apart by their scores, and the others stay alive. So one hypothesis alone
    takes the likeliest word each time, and a beam as wide as there are prefixes searches through
    everything. A batch is done when no hypothesis that is alive can still come among the `beam` best
    that have ended: going on makes it no likelier, and the penalty is the largest at `length`.

    A hypothesis that has not ended before has to end as the token `length`, however unlikely `end` is
    there: all results are whole sequences, and their scores say so.

    Args:
        step: The model, see `Step`. Position 0 reads `start`.
        cache: What the model keeps, before the first token. Rows of one example follow each other.
        batch: Number of examples, each with its own hypotheses.
        beam: Number of hypotheses of each.
        length: The largest number of tokens, `end` included and `start` not.
        start: The token that the model reads first.
        end: The token that ends a sequence.
        alpha: How much longer sequences are preferred, from 0 on. With 0, a score is a log-probability.

    Returns:
        Tokens int32 [batch, beam, length], best first, without `start`, and 0 after `end`; and their
        scores, float32 [batch, beam]. Where there are fewer than `beam` sequences, the others are 0 and
        score -inf.

    Raises:
        ValueError: `alpha` is negative, or there is no place for a hypothesis or a token.
    """
    if not (alpha >= 0 and beam >= 1 and length >= 1):
        raise ValueError(f"beam search needs alpha >= 0, beam >= 1, length >= 1: {alpha}, {beam}, {length}")
    most = math.pow((5 + length) / 6, alpha)

    def going_on(state: _Beam) -> jax.Array:
        can_win = state.chances.max(1) / most > state.scores[:, -1]
        return (state.position < length) & can_win.any()

    def grow(state: _Beam) -> _Beam:
        position = state.position
        read = jax.lax.dynamic_index_in_dim(state.alive, jnp.maximum(position - 1, 0), 2, keepdims=False)
        read = jnp.where(position == 0, start, read)
        logits, cache = step(state.cache, read.reshape(-1), position)
        words = logits.shape[-1]
        chances = state.chances[..., None] + jax.nn.log_softmax(logits).reshape(batch, beam, words)
        allowed = (position < length - 1) | (jnp.arange(words) == end)
        chances = jnp.where(allowed[None, None], chances, -jnp.inf)
        chances, chosen = jax.lax.top_k(chances.reshape(batch, beam * words), beam)
        parent, word = jnp.divmod(chosen, words)
        tokens = jnp.take_along_axis(state.alive, parent[..., None], 1)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, word[..., None], position, 2)

        penalty = ((6 + position.astype(jnp.float32)) / 6) ** alpha
        scores = jnp.where(word == end, chances / penalty, -jnp.inf)
        # Of equals, the first are taken: what has ended before stays, and so do empty places.
        scores, best = jax.lax.top_k(jnp.concatenate([state.scores, scores], 1), beam)
        ended = jnp.take_along_axis(jnp.concatenate([state.ended, tokens], 1), best[..., None], 1)

        rows = (parent + beam * jnp.arange(batch, dtype=parent.dtype)[:, None]).reshape(-1)
        return _Beam(
            position + 1,
            tokens,
            jnp.where(word == end, -jnp.inf, chances),
            ended,
            scores,
            jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), cache),
        )

    nothing = jnp.full((batch, beam), -jnp.inf, jnp.float32)
    empty = jnp.zeros((batch, beam, length), jnp.int32)
    # One hypothesis to begin with: `beam` equal ones would stay equal.
    first = _Beam(jnp.int32(0), empty, nothing.at[:, 0].set(0), empty, nothing, cache)
    last = jax.lax.while_loop(going_on, grow, first)
    return last.ended, last.scores

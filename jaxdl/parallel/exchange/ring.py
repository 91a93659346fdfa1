"""A token ring: the weights travel from member to member, and each adds what it has learnt meanwhile.

Every member computes all the time, with the copy of the weights that it has, and gathers its updates. When
the token arrives, the member adds what it has gathered to the token's weights, keeps them as its copy, and
sends the token on. Nobody waits. Every update gets into the token exactly once, and the token's weights are
always the newest there are; a member's copy lacks what the others have added since the token was with it.

A ring of shards is the same with the weights cut into as many pieces as there are members, each piece with a
token of its own. At each tick every member holds one of them, so each link carries a piece rather than all
of the weights, at the same staleness.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.parallel.exchange import tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Token:
    """The newest weights.

    Attributes:
        weights: a tree of arrays.
        version: int32 scalar, updates that are in them.
    """

    weights: Any
    version: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Member:
    """What a member of the ring has.

    Attributes:
        weights: its copy, which it computes with: those of the token when it was here, and its own updates
            since.
        gathered: the sum of these updates.
        count: int32 scalar, how many they are.
        version: int32 scalar, the token's version when it left.
    """

    weights: Any
    gathered: Any
    count: jax.Array
    version: jax.Array


def start(weights: Any) -> tuple[Token, Member]:
    """Gives the first token, and the member that every one is at the start."""
    zero = jnp.zeros((), jnp.int32)
    return Token(weights, zero), Member(weights, tree.zeros(weights), zero, zero)


def update(member: Member, delta: Any) -> Member:
    """A member learns: `delta` is added to its copy and to what it has gathered."""
    return replace(
        member,
        weights=tree.add(member.weights, delta),
        gathered=tree.add(member.gathered, delta),
        count=member.count + 1,
    )


def visit(member: Member, token: Token) -> tuple[Member, Token]:
    """The token arrives: it takes up what the member has gathered, and the member keeps its weights.

    Where no other member has added anything meanwhile, the member's copy is the newest as it is, bit for bit.
    That makes a ring of one plain training.

    Returns:
        The member, which has gathered nothing now, and the token to be sent on.
    """
    alone = staleness(member, token) == 0
    newest = tree.choose(alone, member.weights, tree.add(token.weights, member.gathered))
    version = token.version + member.count
    fresh = Member(newest, tree.zeros(member.gathered), jnp.zeros_like(member.count), version)
    return fresh, Token(newest, version)


def staleness(member: Member, token: Token) -> jax.Array:
    """Counts the updates of others in the token that a member's copy lacks: int32 scalar.

    In a ring of N members that make an update a tick, while the token makes a step a tick, a member's copy
    lacks at most N (N - 1) updates when the token comes back: N - 1 visits, each with N updates.
    """
    return token.version - member.version


def holder(tick: int | jax.Array, members: int, piece: int | jax.Array = 0) -> int | jax.Array:
    """Tells which member has the token of a piece at a tick; the only one, unless the ring is of shards."""
    return (tick + piece) % members


def without(order: tuple[int, ...], lost: int) -> tuple[int, ...]:
    """Closes the ring where a member was lost: the order of those that are left.

    What the lost one had gathered and not yet added is lost with it. If it held the token, the newest copy of
    the weights that is left becomes the token: see `recovered`.

    Raises:
        ValueError: nobody is left, or the member is not in the ring.
    """
    left = tuple(member for member in order if member != lost)
    if not left or len(left) == len(order):
        raise ValueError(f"a ring of {order} cannot lose {lost}")
    return left


def recovered(members: dict[int, Member]) -> tuple[int, Token]:
    """Makes a token anew, where it was lost with its holder, of the weights of the member that had it last.

    That member's own updates since are not taken: it still has them gathered, and adds them when the token
    comes. Updates that the lost member had put into the token, and no other has seen, are lost.

    Args:
        members: those that are left, by their numbers.

    Returns:
        The number of the member that had the token last, and the token.
    """
    last = max(members, key=lambda number: (int(members[number].version), -number))
    member = members[last]
    return last, Token(tree.subtract(member.weights, member.gathered), member.version)

"""The largest batch that fits, with few compilations: memory grows almost in proportion to the batch."""

from collections.abc import Callable


def largest_that_fits(
    needed: Callable[[int], int | None], *, unit: int, usable: int | None, hint: int | None = None
) -> int | None:
    """Finds the largest multiple of a unit that fits.

    Two sizes give a line, the line an estimate, and what the estimate really needs a better line. The
    answer was tried and fits, and the next multiple was tried and does not, or is a unit above it by a line
    through two sizes nearby.

    Args:
        needed: bytes for a size, a multiple of `unit`; None if it surely does not fit. More for a larger
            size.
        unit: the smallest size.
        usable: bytes there are; None: whatever `needed` answers with a number fits.
        hint: bytes that may turn out to be usable, where `usable` is None: it saves calls.

    Returns:
        The size, or None if not even `unit` fits.
    """
    tried: dict[int, int | None] = {}

    def fits(units: int) -> bool:
        if units not in tried:
            tried[units] = needed(units * unit)
        found = tried[units]
        return found is not None and (usable is None or found <= usable)

    low, high = 0, None  # fits, and does not
    guess = 1
    while high is None or high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = _next(low, high, tried, usable or hint)
    return low * unit or None


def _next(low: int, high: int | None, tried: dict[int, int | None], usable: int | None) -> int:
    """What to try between a size that fits and one that does not, if there is one yet.

    `usable` says where the line of what is known ends.
    """
    known = sorted((units, size) for units, size in tried.items() if size is not None)
    guess = 4 * low if high is None else (low + high) // 2
    if usable is not None and len(known) > 1:
        (first, less), (second, more) = known[-2:]
        if more > less:
            guess = first + int((usable - less) * (second - first) / (more - less))
            # Never far beyond what is known: the line is one of small sizes.
            guess = min(guess, 8 * low) if high is None else guess
            if high is not None and tried[high] is None:
                # The line has been wrong, and no bytes say by how much: little by little.
                guess = min(guess, high - 1 - high // 32)
    guess = max(guess, low + 1)
    return guess if high is None else min(guess, max(high - 1, low))

"""Cutting a minibatch into micro-batches: by rank, then by length, so that padding is small.

Invariants: every sequence is in exactly one micro-batch of one rank; all ranks have the same number of
micro-batches (collectives need that; a rank with too few sequences has empty ones); the result depends on
the lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence

PASS_OVERHEAD = 1 / 128  # of the budget: what one more forward pass costs, counted in tokens


def plan(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Micro-batches of sequence indices for each rank: `plan(...)[rank][micro_batch]`.

    A micro-batch holds at most `budget` padded tokens (its longest sequence times its size), or one sequence
    that is longer. Sequences are dealt to ranks in order of length, back and forth, so that shares are alike.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(order):
        lap, seat = divmod(place, ranks)
        shares[seat if lap % 2 == 0 else ranks - 1 - seat].append(index)
    packed = [_pack(share, lengths, budget) for share in shares]
    count = max(len(rank) for rank in packed)
    return [_split_to(rank, count) for rank in packed]


def padding_fraction(lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> float:
    """The share of padded positions among all positions of these micro-batches; 0 if there are none."""
    padded = sum(len(micro) * max(lengths[i] for i in micro) for micro in micro_batches if micro)
    real = sum(lengths[i] for micro in micro_batches for i in micro)
    return 1.0 - real / padded if padded else 0.0


def _pack(share: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a share, longest first, into runs that cost least: padded tokens plus an overhead for each run.

    Exact, by dynamic programming over the place of the last cut.
    """
    overhead = budget * PASS_OVERHEAD
    cost, cut = [0.0], [0]  # of the first n sequences: least cost, and where their last run begins
    for end in range(1, len(share) + 1):
        best, begin_of_best = float("inf"), end - 1
        for begin in range(end - 1, -1, -1):
            padded = lengths[share[begin]] * (end - begin)
            if padded > budget and end - begin > 1:
                break
            if cost[begin] + padded + overhead < best:
                best, begin_of_best = cost[begin] + padded + overhead, begin
        cost.append(best)
        cut.append(begin_of_best)
    packed: list[list[int]] = []
    end = len(share)
    while end:
        packed.append(share[cut[end] : end])
        end = cut[end]
    return packed[::-1]


def _split_to(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """The same sequences in `count` micro-batches: halve the largest, then add empty ones."""
    result = list(micro_batches)
    while len(result) < count:
        largest = max(range(len(result)), key=lambda i: len(result[i]), default=-1)
        if largest < 0 or len(result[largest]) < 2:
            result.append([])
            continue
        whole = result[largest]
        result[largest : largest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return result

"""`PrefixCache`: a radix tree over token ids.

Its nodes hold what the slots held for them, replay rows included.

A hit copies cached tokens into the request's slot, an insertion copies them out, so nodes need no locks:
nothing points into the tree between two steps. All of it belongs to one weight version; the engine clears it
when the weights change.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from radix_rl.engines.embedded.cache.slots import SlotCache

_SPARE_FRACTION = 0.1
"""Evictions free at least this part of the cache, so that they are rare."""


@dataclass(eq=False, slots=True)
class _Node:
    tokens: list[int]
    """Edge label: the tokens after the parent's."""
    places: np.ndarray
    """`[len(tokens)]` int64, where the pools hold them."""
    parent: "_Node | None"
    last_used: int
    children: "dict[int, _Node]" = field(default_factory=dict)
    """By the first token of their label."""


class PrefixCache:
    """Used by the worker thread only."""

    def __init__(self, cache: SlotCache, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._cache = cache
        self._clock = 0
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; empty."""
        self._pools = [
            torch.zeros(
                self.capacity_tokens,
                tensor.heads,
                tensor.width,
                dtype=tensor.dtype,
                device=self._cache.device,
            )
            for tensor in self._cache.tensors
        ]
        self.clear()

    def release(self) -> None:
        self.clear()
        self._pools = []

    def clear(self) -> None:
        self._root = _Node([], np.empty(0, np.int64), None, 0)
        self._free = list(range(self.capacity_tokens))

    @property
    def used_tokens(self) -> int:
        return self.capacity_tokens - len(self._free)

    def match(self, tokens: list[int]) -> np.ndarray:
        """Places of the longest cached prefix of `tokens`: `[n]` int64."""
        _, _, places = self._walk(tokens)
        return np.concatenate(places) if places else np.empty(0, np.int64)

    def load(self, places: np.ndarray, slot: int) -> None:
        """Copy cached tokens into the beginning of a slot."""
        index = torch.from_numpy(places).to(self._cache.device)
        for tensor, pool in zip(self._cache.tensors, self._pools, strict=True):
            tensor.slots[slot, :, : len(places)].copy_(pool.index_select(0, index).transpose(0, 1))

    def insert(self, tokens: list[int], slot: int) -> None:
        """Keep what a slot holds for `tokens`, as far as room can be made.

        What is cached already is not copied again.
        """
        node, offset, places = self._walk(tokens)
        known = sum(map(len, places))
        if known == len(tokens):
            return
        if offset < len(node.tokens):
            node = self._split(node, offset)
        added = self._take_places(min(len(tokens) - known, self.capacity_tokens), keep=node)
        if len(added) == 0:
            return
        self._cache.settle()
        index = torch.from_numpy(added).to(self._cache.device)
        end = known + len(added)
        for tensor, pool in zip(self._cache.tensors, self._pools, strict=True):
            pool.index_copy_(0, index, tensor.slots[slot, :, known:end].transpose(0, 1))
        node.children[tokens[known]] = _Node(tokens[known:end], added, node, self._clock)

    def _walk(self, tokens: list[int]) -> tuple[_Node, int, list[np.ndarray]]:
        """The node where the match ends, how much of its label matched, and the places so far."""
        self._clock += 1
        node, offset, start = self._root, 0, 0
        places: list[np.ndarray] = []
        while start < len(tokens):
            child = node.children.get(tokens[start])
            if child is None:
                break
            node = child
            node.last_used = self._clock
            offset = common_length(node.tokens, tokens[start : start + len(node.tokens)])
            places.append(node.places[:offset])
            start += offset
            if offset < len(node.tokens):
                break
        return node, offset, places

    def _split(self, node: _Node, offset: int) -> _Node:
        """Cut a node's label in two; returns the upper part."""
        assert node.parent is not None
        upper = _Node(node.tokens[:offset], node.places[:offset], node.parent, node.last_used)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.places, node.parent = node.tokens[offset:], node.places[offset:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _take_places(self, count: int, keep: _Node) -> np.ndarray:
        """Find up to `count` free places, evicting the leaves that were unused for longest.

        `keep` and its parents stay.
        """
        if len(self._free) < count:
            self._evict(max(count, int(self.capacity_tokens * _SPARE_FRACTION)), keep)
        taken = self._free[-count:]
        del self._free[-count:]
        return np.array(taken, dtype=np.int64)

    def _evict(self, wanted_free: int, keep: _Node) -> None:
        while len(self._free) < wanted_free:
            leaves = [leaf for leaf in self._leaves() if leaf is not keep]
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda leaf: leaf.last_used):
                assert leaf.parent is not None
                del leaf.parent.children[leaf.tokens[0]]
                self._free.extend(leaf.places.tolist())
                if len(self._free) >= wanted_free:
                    return

    def _leaves(self) -> list[_Node]:
        leaves: list[_Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                leaves.append(node)
        return leaves


def common_length(left: list[int] | tuple[int, ...], right: list[int] | tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    if left == right:
        return len(left)
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))

"""States of prompts that may begin other prompts.

The tokens of the prompts of each owner are kept in a tree, which branches where prompts begin to differ. A
state is kept before the last token of a prompt, and at the junction where two prompts begin to differ: the
second prompt is read up to the junction first, so that a third prompt can start from the state there (Pan et
al. 2024, "Marconi", arXiv 2411.19379, section 4.1). The least recently used states are dropped first.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SHORTEST = 16  # minimum tokens for a kept state: fewer are read as fast as a state is copied
OVERHEAD = 1024  # bytes of a node besides its tokens and the tensors of its state

Tokens = NDArray[np.int64]


class _Node:
    """A node at the end of a run of tokens that begins at its parent."""

    def __init__(self, tokens: Tokens, depth: int, parent: "_Node | None") -> None:
        self.tokens, self.depth, self.parent = tokens, depth, parent
        self.children: dict[int, _Node] = {}
        self.state: Any = None
        self.nbytes = 0


class Prefixes:
    """States of prompts, by the tokens that they have read, up to a number of bytes.

    Args:
        most_bytes: maximum number of bytes of all states and of the tree of their tokens.

    Attributes:
        nbytes: bytes of the states and of the tree.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self._roots: dict[str, _Node] = {}  # by owner
        self._used: dict[_Node, None] = {}  # nodes with a state, the one used last at the end

    def find(self, tokens: Tokens, owner: str) -> tuple[int, Any, int | None]:
        """Look for the longest prefix that is kept of prompts of this owner.

        Returns:
            The number of tokens that its state has read, or 0; this state, or None; and the place where
            `tokens` begin to differ from an earlier prompt, or None if a state there would be of no use.
        """
        root = self._root(owner)
        node, depth, best = root, 0, root
        parts: int | None = None
        while depth < len(tokens) and (child := node.children.get(int(tokens[depth]))) is not None:
            common = _common(child.tokens, tokens[depth:])
            depth += common
            if common < len(child.tokens):
                parts = depth
                break
            node = child
            if node.state is not None:
                best = node
        else:
            # Other prompts continue from here, or did so earlier.
            parts = depth if node.state is None and node is not root else None
        if best.state is not None:
            self._used[best] = self._used.pop(best)
        useful = parts is not None and parts >= best.depth + SHORTEST and parts < len(tokens)
        return best.depth, best.state, parts if useful else None

    def keep(self, tokens: Tokens, owner: str, state: Any, nbytes: int) -> None:
        """Keep the state of a prompt after these tokens; the state must not be changed afterwards."""
        if len(tokens) < SHORTEST or nbytes + tokens.nbytes + OVERHEAD > self.most_bytes:
            return
        node = self._node(tokens, owner)
        self._forget_state(node)
        node.state, node.nbytes = state, nbytes
        self._used[node] = None
        self.nbytes += nbytes
        while self.nbytes > self.most_bytes:
            oldest = next(iter(self._used))
            self._forget_state(oldest)
            self._prune(oldest)

    def _root(self, owner: str) -> _Node:
        return self._roots.setdefault(owner, _Node(np.empty(0, np.int64), 0, None))

    def _node(self, tokens: Tokens, owner: str) -> _Node:
        """Return the node at the end of these tokens; make the node if needed."""
        node, depth = self._root(owner), 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                child = _Node(tokens[depth:].copy(), len(tokens), node)
                node.children[int(tokens[depth])] = child
                self.nbytes += child.tokens.nbytes + OVERHEAD
                return child
            common = _common(child.tokens, tokens[depth:])
            if common < len(child.tokens):
                child = self._split(child, common)
            node, depth = child, depth + common
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut the run of a node after `length` tokens: return the new node there."""
        parent = node.parent
        assert parent is not None, "the root has no tokens"
        middle = _Node(node.tokens[:length].copy(), parent.depth + length, parent)
        parent.children[int(middle.tokens[0])] = middle
        node.tokens, node.parent = node.tokens[length:].copy(), middle
        middle.children[int(node.tokens[0])] = node
        self.nbytes += OVERHEAD
        return middle

    def _forget_state(self, node: _Node) -> None:
        if node.state is not None:
            del self._used[node]
            self.nbytes -= node.nbytes
            node.state, node.nbytes = None, 0

    def _prune(self, node: _Node) -> None:
        """Drop a branch that leads to no state."""
        while node.state is None and not node.children and (parent := node.parent) is not None:
            del parent.children[int(node.tokens[0])]
            self.nbytes -= node.tokens.nbytes + OVERHEAD
            node = parent


def _common(a: Tokens, b: Tokens) -> int:
    """Return the number of tokens of the longest common prefix of two sequences."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n

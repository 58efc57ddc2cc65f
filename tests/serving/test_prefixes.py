"""The tree of prompts, against a list of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unrolled.serving import prefixes
from unrolled.serving.prefixes import OVERHEAD, SHORTEST, Prefixes

STATE = 10**6  # bytes

# Few tokens and repeated beginnings, so that prompts part at many places.
PIECES = st.lists(st.sampled_from([b"aaaaaaaaaaaaaaaa", b"bbbb", b"abababababababab", b"c"]), max_size=6)
PROMPTS = PIECES.map(lambda pieces: np.frombuffer(b"".join(pieces), np.uint8).astype(np.int64))


def common(a, b):
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


@given(st.lists(PROMPTS, max_size=8), PROMPTS)
def test_it_finds_the_longest_prefix_and_where_a_prompt_parts_from_others(kept, prompt):
    tree, known = Prefixes(10**9), {}
    for number, tokens in enumerate(kept):
        tree.keep(tokens, "", number, 1)
        if len(tokens) >= SHORTEST:
            known[tokens.tobytes()] = number
    prefixes_ = [i for i in range(len(prompt) + 1) if prompt[:i].tobytes() in known]
    best = max(prefixes_, default=0)
    parts = max((common(np.frombuffer(x, np.int64), prompt) for x in known), default=0)
    useful = best + SHORTEST <= parts < len(prompt)
    state = known.get(prompt[:best].tobytes()) if best else None
    assert tree.find(prompt, "") == (best, state, parts if useful else None)
    assert tree.nbytes == len(known) + size(tree._root("")) - OVERHEAD  # less that of the root


@given(st.lists(st.tuples(PROMPTS, st.booleans()), max_size=30), st.integers(1, 5))
def test_what_was_not_used_for_the_longest_time_goes_first(prompts, most):
    tree, known = Prefixes(most * STATE + STATE // 2), {}  # the tree itself takes less than half a state
    for number, (tokens, looked_up) in enumerate(prompts):
        if looked_up:
            depth, state, _ = tree.find(tokens, "")
            assert depth == max(
                (len(np.frombuffer(x, np.int64)) for x in known if tokens.tobytes().startswith(x)), default=0
            )
            if depth:
                found = tokens[:depth].tobytes()
                assert state == known[found]
                known[found] = known.pop(found)
        elif len(tokens) >= SHORTEST:
            tree.keep(tokens, "", number, STATE)
            known.pop(tokens.tobytes(), None)
            known[tokens.tobytes()] = number
            if len(known) > most:
                del known[next(iter(known))]
        assert tree.nbytes == len(known) * STATE + size(tree._root("")) - OVERHEAD


def nodes(node):
    return 1 + sum(map(nodes, node.children.values()))


def size(node):
    """Bytes of the tree from a node on."""
    return OVERHEAD + node.tokens.nbytes + sum(map(size, node.children.values()))


def test_branches_without_a_state_are_dropped():
    tree = Prefixes(STATE + STATE // 2)
    for first in range(50):
        tree.keep(np.full(20, first), "", first, STATE)
    assert nodes(tree._root("")) == 2


def test_long_prompts_count_also_if_their_states_are_small():
    tree = Prefixes(20_000)
    for first in range(50):
        tree.keep(np.full(1_000, first), "", first, 1)
    assert nodes(tree._root("")) == 3
    assert tree.nbytes == 2 * (1 + 8_000 + OVERHEAD)
    tree.keep(np.full(3_000, 50), "", 50, 1)
    assert nodes(tree._root("")) == 3


def test_owners_share_nothing_but_the_memory():
    tree = Prefixes(2 * STATE + STATE // 2)
    for owner in ("a", "b", "c"):
        tree.keep(np.zeros(20, np.int64), owner, owner, STATE)
    prompt = np.zeros(30, np.int64)
    found = [tree.find(prompt, owner)[1] for owner in ("a", "b", "c", "d")]
    assert found == [None, "b", "c", None]


def test_states_that_are_too_large_are_not_kept():
    tree = Prefixes(10)
    tree.keep(np.zeros(20, np.int64), "", "state", 11)
    assert tree.find(np.zeros(30, np.int64), "") == (0, None, None)
    assert prefixes.SHORTEST == 16  # what the pieces of this file are made for


def test_a_state_that_was_found_is_dropped_after_others():
    tree = Prefixes(2 * STATE + STATE // 2)
    a, b, c = (np.full(20, token) for token in range(3))
    tree.keep(a, "", "a", STATE)
    tree.keep(b, "", "b", STATE)
    assert tree.find(np.append(a, 9), "")[1] == "a"
    tree.keep(c, "", "c", STATE)
    assert [tree.find(np.append(x, 9), "")[1] for x in (a, b, c)] == ["a", None, "c"]


def test_no_state_is_wanted_close_behind_one_that_is_kept():
    tree, a = Prefixes(10**9), np.zeros(20, np.int64)
    tree.keep(a, "", "a", 1)
    tree.keep(np.append(a, [1] * 20), "", "b", 1)
    for more, parts in ((15, None), (16, 36)):
        assert tree.find(np.concatenate([a, [1] * more, [2]]), "") == (20, "a", parts)

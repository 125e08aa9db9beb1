"""What an instance is thought to hold, and which heads are frequent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecoserve.scheduler.learning import Learnt
from ecoserve.scheduler.prefixes import BLOCK_BYTES, FrequentHeads, PrefixCache, chain

texts = st.binary(max_size=20).map(lambda seed: b"".join(bytes([b]) * BLOCK_BYTES for b in seed))


@given(texts, texts, texts)
def test_chains_are_equal_as_far_as_the_bytes_are(common, one, two) -> None:
    a, b = chain(common + one), chain(common + two)
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    blocks = (len(common) + shared) // BLOCK_BYTES
    assert a[:blocks] == b[:blocks]
    assert a[blocks : blocks + 1] != b[blocks : blocks + 1] or len(a) == len(b) == blocks


@given(st.lists(texts, max_size=6), st.integers(1, 40))
def test_holds_what_was_last_added_within_its_capacity(prompts, capacity) -> None:
    cache = PrefixCache(capacity)
    for prompt in prompts:
        names = chain(prompt)
        cache.add([names])
        assert len(cache) <= capacity
        assert cache.held([names]) == min(len(set(names)), capacity) * BLOCK_BYTES or (
            cache.held([names]) >= min(len(names), capacity) * BLOCK_BYTES
        )


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    cache = PrefixCache(4)
    cache.add([chain(b"a" * 4 * BLOCK_BYTES)])
    cache.add([chain(b"b" * 2 * BLOCK_BYTES)])
    assert cache.held([chain(b"a" * 4 * BLOCK_BYTES)]) == 2 * BLOCK_BYTES


def test_trust_follows_what_engines_say() -> None:
    cache = PrefixCache()
    assert cache.trust == 1.0
    for _ in range(50):
        cache.correct(100, 0)
    assert cache.trust < 0.05
    for _ in range(50):
        cache.correct(100, 150)
    assert cache.trust > 0.95


def test_frequent_heads_are_found_in_a_stream_of_rare_ones() -> None:
    heads = FrequentHeads(number=16, halve_every=10_000)
    for i in range(3000):
        for key in (i + 100, *([7] if i % 5 == 0 else [])):
            if not heads.seen(key):
                heads.add(key, "/p", str(key).encode())
    assert heads.most_frequent(number=1) == [("/p", b"7")]


def test_heads_are_bounded_and_forgotten() -> None:
    heads = FrequentHeads(number=4, most_bytes=10, halve_every=50)
    heads.add(1, "/p", b"x" * 11)
    assert not heads.seen(1)
    heads.add(2, "/p", b"old")
    for _ in range(10):
        heads.seen(2)
    assert heads.most_frequent() == [("/p", b"old")]
    assert heads.most_frequent(total_bytes=2) == []
    for i in range(1000):
        heads.seen(1000 + i)
    assert heads.most_frequent() == []


def test_learns_the_ratio_and_the_length_of_answers() -> None:
    learnt = Learnt()
    assert learnt.bytes_per_token == 4.0
    for _ in range(2000):
        learnt.prompt(300, 100)
        learnt.answer(40, 2)
    assert abs(learnt.bytes_per_token - 3.0) < 0.01
    assert abs(learnt.output_tokens - 20) < 0.1
    for _ in range(3000):
        learnt.prompt(600, 100)
    assert abs(learnt.bytes_per_token - 6.0) < 0.01


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=8).map("".join), max_size=30),
    st.integers(1, 12),
)
def test_what_is_held_of_a_prompt_is_its_beginning(prompts: list[str], capacity: int) -> None:
    cache = PrefixCache(capacity)
    for text in prompts:
        names = chain(b"".join(letter.encode() * BLOCK_BYTES for letter in text))
        present = [name in cache._blocks for name in names]
        # No gap: the blocks that are there are the first ones, as many as are told.
        assert present == sorted(present, reverse=True)
        assert cache.held([names]) == sum(present) * BLOCK_BYTES
        cache.add([names])

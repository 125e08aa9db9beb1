"""As ``test_relay_answer``, with a tokenizer of Llama's kind.

Spaces are part of words, the first is taken off, and a character that is not in the vocabulary is
as many tokens as it has bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.relay import engine as engine_module
from tests.relay.engine import CHAT, COMPLETIONS, Engine, ids
from tests.relay.test_relay_answer import PROMPT, Seen, body, cases, relayed


@cache
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast  # vLLM has to be imported before

    parts = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz,.?",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    merges += [("a", "b"), ("ab", "c"), ("▁", "a"), ("n", "d"), ("▁a", "nd")]
    vocabulary = {token: i for i, token in enumerate([*parts, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        eos_token="<|end|>",
    )


@given(
    case=cases(),
    path=st.sampled_from([CHAT, COMPLETIONS]),
    grouping=st.integers(0, 50),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_cut_anywhere_within_characters_of_bytes(
    case: dict[str, Any], path: str, grouping: int, cuts: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "tokenizer", tokenizer)
        engine = Engine(grouping=grouping)
        # Its words as this tokenizer has them, whatever the other one made of them.
        engine.give(ids(PROMPT), ids(case["words"]))
        asked = body(path, **case["more"])
        uncut = list(engine.stream(path, asked))
        cut = relayed(engine, path, asked, cuts)
        assert Seen.of(cut).shape() == Seen.of(uncut).shape()


def test_a_character_is_several_tokens() -> None:
    assert len(tokenizer().tokenize("你")) == 4
    assert tokenizer().decode(tokenizer().encode("the cat 你 and")) == "the cat 你 and"

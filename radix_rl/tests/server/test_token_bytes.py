"""Bytes and texts of single tokens, with real tokenizers of both kinds."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radix_rl.server.generation.token_bytes import token_bytes, token_text


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate([*alphabet, "Ã©"])}, [("Ã", "©")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"é": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_bytes_of_a_character_s_parts_make_the_character(kind, request):
    tokenizer = request.getfixturevalue(kind)
    parts = tokenizer.encode("漢")
    assert len(parts) == 3
    assert b"".join(token_bytes(tokenizer, part) for part in parts).decode() == "漢"
    # E6 BC A2
    assert [token_text(tokenizer, part) for part in parts] == ["\xe6", "\xbc", "\xa2"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_whole_character_is_its_text(kind, request):
    """Its piece in the vocabulary is written with symbols that also stand for bytes."""
    tokenizer = request.getfixturevalue(kind)
    (token,) = tokenizer.encode("é")
    assert (token_bytes(tokenizer, token), token_text(tokenizer, token)) == ("é".encode(), "é")


def test_a_special_token_is_its_text(byte_level):
    assert token_bytes(byte_level, byte_level.eos_token_id) == b"<eos>"

"""The bytes of one token, also of one that is only a part of a character."""

import re
from functools import cache

from transformers.convert_slow_tokenizer import bytes_to_unicode

from radix_rl.server.items import Tokenizer

_REPLACEMENT = "�"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Of a part of a character the bytes that the vocabulary has; of any other token its text in UTF-8."""
    text = tokenizer.decode([token_id])
    if _REPLACEMENT not in text:
        return text.encode()
    # Only what decoding has lost is looked up: a piece which is a character itself is not taken for bytes.
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if found := _BYTE_FALLBACK.fullmatch(piece):
        return bytes([int(found[1], 16)])
    known = _byte_of_symbol()
    return bytes(known[symbol] for symbol in piece) if known.keys() >= set(piece) else text.encode()


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Its text; of a part of a character one code point below 256 a byte, as SGLang writes it."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


@cache
def _byte_of_symbol() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable symbol."""
    return {symbol: byte for byte, symbol in bytes_to_unicode().items()}

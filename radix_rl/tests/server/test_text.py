"""Text of a growing answer."""

from radix_rl.server.generation.sampling import TextOptions
from radix_rl.server.generation.text import GrowingText


class Letters:
    """Token c is the letter of code point c."""

    def decode(self, token_ids, **_):
        return "".join(map(chr, token_ids))


def shown(text: str, *stop: str) -> list[str]:
    growing = GrowingText(Letters(), TextOptions(), stop)
    return [growing.push([ord(letter)]) for letter in text]


def test_what_may_begin_a_stop_string_waits():
    assert shown("abcab", "bcx") == ["a", "a", "a", "abca", "abca"]


def test_from_the_earliest_of_several_stop_strings_on_nothing_is_shown():
    """Whatever their order: both may be there when the answer ends."""
    for stop in (("c", "b"), ("b", "c")):
        assert shown("abcd", *stop) == ["a", "a", "a", "a"]

"""Sizes and durations as people write them, and which keys there are."""

import multiprocessing

import pytest

from radix_transfer_plugins.errors import ConfigError, KeyOutsidePrefixError
from radix_transfer_plugins.keys import KeySource, check_prefix, is_field_name, is_key, require_inside
from radix_transfer_plugins.sizes import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *((0, 0), (17, 17), ("17", 17), ("17b", 17), ("1k", 1024), ("1kb", 1024), ("1 KiB", 1024)),
        *(("64mb", 64 << 20), ("64 MiB", 64 << 20), ("1gb", 1 << 30), ("1.5GB", 3 << 29), (" 2tb ", 2 << 40)),
    ],
)
def test_sizes_count_by_1024(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KB"), (3 << 19, "1.5 MB"), (5 << 30, "5.0 GB"),
     (2 << 40, "2.0 TB"), (3000 << 40, "3000.0 TB")],
)  # fmt: skip
def test_sizes_are_shown_in_the_largest_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(-5, "0s"), (59.9, "59s"), (60, "1m 00s"), (3599, "59m 59s"), (7325, "2h 02m"), (100_000, "1d 03h")],
)
def test_durations_are_shown_in_their_two_largest_units(duration_s, text):
    assert format_seconds(duration_s) == text


@pytest.mark.parametrize(
    "value", [-1, True, 1.5, None, "", "gb", "1eb", "-1gb", "1e9", "1,5gb", "1gb extra", "\u0661gb", "9" * 30]
)
def test_what_is_no_size_is_refused_with_examples(value):
    with pytest.raises(ConfigError, match=r'local_buffer_size: expected bytes .* "1gb"'):
        parse_bytes(value, "local_buffer_size")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(0, 0), (1.5, 1.5), ("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129600)],
)
def test_durations(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("value", [-1, True, None, "", "h", "2w", float("nan"), float("inf"), "-2h"])
def test_what_is_no_duration_is_refused_with_examples(value):
    with pytest.raises(ConfigError, match=r'expected seconds .* "2h"'):
        parse_seconds(value)


@pytest.mark.parametrize("key", ["a", "run-1/output-store/w/0/f", "a.b/..c/d..", "A_1=x:y@z+w", "a" * 512])
def test_keys(key):
    assert is_key(key)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/..",
        "../a",
        "a/./b",
        "a b",
        "a\n",
        "a\\b",
        "\u00e9",
        "a%2f",
        "a" * 513,
    ],
)
def test_what_is_no_key(key):
    assert not is_key(key)


def test_field_names_are_plain_identifiers():
    assert all(map(is_field_name, ["a", "_a1", "routed_experts"]))
    assert not any(map(is_field_name, ["", "1a", "a-b", "a/b", "a.b", "\u00e9", "a\n", "a" * 129]))


def test_a_key_is_inside_its_prefix_only_after_a_slash():
    require_inside("run/store/a", "run/store")
    for key in ("run/store", "run/store-evil/a", "run/stor", "run", "other/run/store/a", "run/store/../x"):
        with pytest.raises(KeyOutsidePrefixError, match="neither read nor deleted"):
            require_inside(key, "run/store")


def test_a_prefix_leaves_room_for_keys_and_fields():
    longest = check_prefix("a" * 256)
    assert is_key(KeySource(longest).next() + "/" + "f" * 128)


def test_a_forked_child_makes_keys_of_its_own():
    source = KeySource("run")
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sender.send([source.next() for _ in range(3)])
    )
    child.start()
    keys = receiver.recv()
    child.join()
    assert len({*keys, *(source.next() for _ in range(3))}) == 6


def test_a_restart_makes_keys_of_its_own():
    assert len({KeySource("run").next() for _ in range(100)}) == 100

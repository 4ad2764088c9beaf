"""Hostile references: only typed errors come out, and nothing outside the key prefix is read or deleted."""

import copy
import math
import random
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend
from radix_transfer_plugins.errors import KeyOutsidePrefixError, OutputStoreError, RefError

PREFIX = "run-1/output-store"
REMOVED = object()


def cases(number):
    """Run the test with `number / CASES_A_SEED` seeds."""

    def decorate(test):
        profile = settings(max_examples=number // CASES_A_SEED, deadline=None, database=None)
        return profile(given(seed=st.integers(0, 2**64))(test))

    return decorate


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE_VALUES = [
    *(None, True, False, REMOVED, b"", b"raw", (), [], {}, [[]], {"a": {}}, {1: 2}, {"": []}, nested(50)),
    *(-1, 0, 1, 2, 3, 7, 24, 2**31, 2**32 + 1, 2**53 - 1, 2**53, 2**63, 2**64, 10**400, -(10**400)),
    *(0.0, 1.0, -1.5, 1e300, math.nan, math.inf, -math.inf),
    *(
        "",
        "1",
        "int32",
        "bool",
        "object",
        "<i4",
        "raw",
        "narrow",
        "positions",
        "zip",
        "memory",
        "mooncake",
        "x" * 1000,
    ),
    *(
        "..",
        "../raw",
        "a/b",
        "crc32:00000000",
        "crc32:0000000\u0660",
        "crc32:00000000\n",
        "\x00",
        "\u00fc",
        "\ud800",
    ),
    *(
        [3, 4, 2],
        [24],
        [0, 2**40],
        [2**52, 2**52],
        [2**26, 2**26, 0],
        [-3, -8],
        [1] * 40,
        [1.0],
        [True],
        ["1"],
        [None],
    ),
    *({"ids": 8}, {"ids": True}, {"ids": 2**60}, {"ids": 8, "x": 1}, {"\u00fc": 1}, {"ids": None}),
]
SPEC_MEMBERS = ("dtype", "shape", "codec", "codec_config", "stored_bytes", "start_row", "checksum", "other")
PATHS = [
    *((name,) for name in ("version", "backend", "key", "fields", "other")),
    *(("fields", name) for name in ("routed_experts", "../x", "", "a/b", "\u00fc", "x")),
    *(("fields", "routed_experts", name) for name in SPEC_MEMBERS * 3),
    *(("fields", "routed_experts", "shape", index) for index in range(3)),
    *(("fields", "routed_experts", "codec_config", name) for name in ("ids", "x")),
]
CASES_A_SEED = 20
"""Hypothesis chooses seeds: drawing every value through it would take a minute."""


def hostile_changes(random):
    """One to three (path, value) pairs."""
    number = random.randint(1, 3)
    return [(random.choice(PATHS), hostile_value(random)) for _ in range(number)]


def hostile_value(random):
    return random.choice(HOSTILE_VALUES) if random.random() < 0.8 else random.randint(-(2**70), 2**70)


def changed(data, changes):
    """A copy of `data` with the values at some paths replaced or removed."""
    data = copy.deepcopy(data)
    for (*parents, last), value in changes:
        target = data
        for name in parents:
            target = target.get(name) if isinstance(target, dict) else None
        if isinstance(target, dict):
            if value is REMOVED:
                target.pop(last, None)
            else:
                target[last] = value
        elif isinstance(target, list) and isinstance(last, int) and last < len(target):
            target[last] = value
    return data


def valid(codec, config, stored_bytes):
    spec = {"dtype": "int32", "shape": [3, 4, 2], "codec": codec, "codec_config": config, "start_row": 0}
    spec |= {"stored_bytes": stored_bytes, "checksum": "crc32:00000000"}
    return {"version": 1, "backend": "memory", "key": f"{PREFIX}/w/0", "fields": {"routed_experts": spec}}


VALID = [valid("raw", {}, 96), valid("narrow", {"ids": 8}, 24), valid("positions", {}, 50)]


def parsed(data):
    try:
        return StoreRef.from_builtins(data)
    except RefError as error:
        return error


@cases(8000)
def test_parsing_anything_gives_a_ref_or_a_ref_error(seed):
    rng = random.Random(seed)
    for _ in range(CASES_A_SEED):
        outcome = parsed(changed(rng.choice(VALID), hostile_changes(rng)))
        if isinstance(outcome, StoreRef):
            assert parsed(outcome.to_builtins()) == outcome
        else:
            assert len(str(outcome)) < 1500


@pytest.fixture(scope="module")
def guarded():
    """A store with objects below its prefix and beside it.

    It fails the test if it is asked for a key outside.
    """
    backend = create_backend("memory", {"name": uuid.uuid4().hex})
    outside = [
        "run-1/output-store-evil/w/0/routed_experts",
        "run-1/routed_experts",
        "other/w/0/routed_experts",
    ]
    backend.put_batch([(key, b"theirs") for key in outside])
    stash = TokenOutputStash(routed_experts=np.ones((3, 4, 2), np.int32))
    (ref,) = OutputStore(backend, key_prefix=PREFIX).put_many([stash])
    get_batch, delete_batch = backend.get_batch, backend.delete_batch

    def inside_only(keys):
        assert all(key.startswith(PREFIX + "/") and ".." not in key.split("/") for key in keys), keys
        return keys

    backend.get_batch = lambda keys: get_batch(inside_only(keys))
    backend.delete_batch = lambda keys: delete_batch(inside_only(keys))
    return OutputStore(backend, key_prefix=PREFIX), backend, outside, ref


PATH_PIECES = [
    *(
        "run-1",
        "output-store",
        "..",
        ".",
        "",
        "/",
        "//",
        "\\",
        "%2e%2e",
        "~",
        "*",
        "\x00",
        "\n",
        "\u2025",
        "\u00e9",
    ),
    *(PREFIX, PREFIX + "/", PREFIX + "-evil", PREFIX + "/..", "a", "w/0", "/w/0", 7),
]


@cases(4000)
def test_reading_and_deleting_any_key_stays_below_the_prefix(guarded, seed):
    rng = random.Random(seed)
    for _ in range(CASES_A_SEED):
        pieces = [str(rng.choice(PATH_PIECES)) for _ in range(rng.randint(0, 4))]
        rows = rng.choice([0, 1, 3, 2**31, 2**45])
        wanted = rng.choice([None, (0, 0), (0, 1), (-1, 2), (2**31, 2**40), (1, 0)])
        attack(guarded, rng.choice(["", "/"]).join(pieces), rows, wanted)


def attack(guarded, key, rows, wanted):
    """Read and delete what does not exist under `key`."""
    store, backend, outside, _ = guarded
    field = "routed_experts"
    spec = {"dtype": "int32", "shape": [rows, 2], "codec": "raw", "stored_bytes": 8 * rows}
    spec["checksum"] = "crc32:00000000"
    ref = parsed({"version": 1, "backend": "memory", "key": key, "fields": {field: spec}})
    if isinstance(ref, RefError):
        return
    request = (ref, [field]) if wanted is None else (ref, [field], {field: wanted})
    with pytest.raises(OutputStoreError):
        store.read_many([request], stash_type=TokenOutputStash, buffer_bytes=1 << 62)
    if ref.key.startswith(PREFIX + "/"):
        store.delete_many([ref])
    else:
        with pytest.raises(KeyOutsidePrefixError):
            store.delete_many([ref])
    assert {info.key for info in backend.list("")} >= set(outside)


@cases(3000)
def test_a_forged_spec_of_a_real_object_gives_a_typed_error_or_the_stored_values(guarded, seed):
    store, _, _, real = guarded
    rng = random.Random(seed)
    for _ in range(CASES_A_SEED):
        data = changed(real.to_builtins(), hostile_changes(rng))
        try:
            request = (StoreRef.from_builtins(data), ["routed_experts"])
            (stash,) = store.read_many([request], stash_type=TokenOutputStash, buffer_bytes=1 << 30)
        except OutputStoreError:
            continue
        assert stash.routed_experts.tobytes() == np.ones((3, 4, 2), np.int32).tobytes()


def test_nesting_beyond_the_recursion_limit_is_a_ref_error():
    deep = nested(200_000)
    spec = {"dtype": deep, "shape": [deep], "codec": deep, "stored_bytes": deep, "checksum": deep}
    for data in (
        {"version": deep},
        {"version": 1, "backend": "memory", "key": "a/b", "fields": {"x": spec}},
        {"version": 1, "backend": "memory", "key": "a/b", "fields": deep},
        {"version": 1, "backend": deep, "key": "a/b", "fields": {}},
    ):
        with pytest.raises(RefError):
            StoreRef.from_builtins(data)
    while deep:
        deep = deep[0]

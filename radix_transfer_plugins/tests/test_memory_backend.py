"""The memory backend passes the conformance suite, and shares its objects by name."""

import uuid

import pytest

from radix_transfer_plugins import create_backend
from radix_transfer_plugins.errors import ConfigError, StoreFullError
from radix_transfer_plugins.testing import BackendConformance


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    def connect(self):
        name = uuid.uuid4().hex
        return lambda: create_backend("memory", {"name": name})

    @pytest.fixture
    def connect_small(self):
        name = uuid.uuid4().hex
        return lambda: create_backend("memory", {"name": name, "capacity_bytes": "1mb", "wait_s": 1})


def test_full_store_error_names_need_used_free_and_capacity():
    backend = create_backend("memory", {"name": uuid.uuid4().hex, "capacity_bytes": 100, "wait_s": 0})
    backend.put_batch([("a/a", bytes(60))])
    with pytest.raises(StoreFullError, match=r"need 70 bytes, used 60, free 40, capacity 100"):
        backend.put_batch([("a/b", bytes(70))])


def test_names_are_separate_spaces_and_an_empty_unused_space_is_forgotten():
    name = uuid.uuid4().hex
    first = create_backend("memory", {"name": name, "capacity_bytes": 100})
    with pytest.raises(ConfigError, match="capacity_bytes"):
        create_backend("memory", {"name": name, "capacity_bytes": 200})
    first.put_batch([("a/a", b"x")])
    other = create_backend("memory", {"name": name + "2"})
    assert list(other.list("")) == []
    first.delete_batch(["a/a"])
    first.close()
    assert create_backend("memory", {"name": name, "capacity_bytes": 200}).stats().capacity_bytes == 200


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"capacity": 1},
            "unknown option 'capacity'; known options: name, capacity_bytes, wait_s, key_prefix",
        ),
        ({"capacity_bytes": "1 zb"}, 'such as "512mb"'),
        ({"capacity_bytes": -1}, "-1"),
        ({"wait_s": "soon"}, '"90s"'),
        ({"key_prefix": "/run"}, "key_prefix"),
        ({"name": 3}, "Expected `str`, got `int`"),
        ("{", "JSON"),
        ("[]", "JSON object"),
    ],
)
def test_bad_configuration_names_the_option_and_the_remedy(config, message):
    with pytest.raises(ConfigError) as caught:
        create_backend("memory", config)
    assert message in str(caught.value)

"""Backends and codecs by name: lazy, without duplicates, and with errors that name the known ones."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

import radix_transfer_plugins
from radix_transfer_plugins import (
    OutputStore,
    StoreRef,
    class_registry,
    create_backend,
    register_backend,
    register_codec,
    registry,
)
from radix_transfer_plugins.backends.memory import MemoryBackend
from radix_transfer_plugins.codecs.raw import RawCodec
from radix_transfer_plugins.errors import ConfigError


@pytest.fixture
def fresh(monkeypatch):
    """Registries that forget what a test registers, and whose entry points a test chooses."""
    for one in (registry._backends, registry._codecs):
        monkeypatch.setattr(one, "_classes", dict(one._classes))
        monkeypatch.setattr(one, "_found", None)

    def set_entry_points(**points):
        group = "radix_transfer_plugins.backends"
        found = [EntryPoint(name, value, group) for name, values in points.items() for value in values]
        monkeypatch.setattr(
            class_registry, "entry_points", lambda group: found if group.endswith("backends") else []
        )

    return set_entry_points


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ConfigError, match="unknown backend 'redis'; known backends: memory, mooncake, shared_memory"
    ):
        create_backend("redis")
    with pytest.raises(
        ConfigError,
        match="unknown codec 'zip'; known codecs: deltas, experts, narrow",
    ):
        registry.get_codec("zip")


def test_a_registered_backend_and_codec_work_like_the_built_in_ones(fresh):
    @register_backend
    class MineBackend(MemoryBackend):
        name = "mine"

    @register_codec
    class NegatedCodec(RawCodec):
        name = "negated"

        def encode(self, array, start_row):
            return super().encode(-array, start_row)

        def decode(self, data, dtype, shape, start_row, rows=None):
            return -super().decode(data, dtype, shape, start_row, rows)

    store = OutputStore(create_backend("mine"), codecs={"routed_experts": NegatedCodec()})
    stash_type = radix_transfer_plugins.TokenOutputStash
    (ref,) = store.put_many([stash_type(routed_experts=np.arange(4, dtype=np.int32))])
    ref = StoreRef.from_builtins(ref.to_builtins())
    assert (ref.backend, ref.fields["routed_experts"].codec) == ("mine", "negated")
    (stash,) = store.read_many([(ref, ["routed_experts"])], stash_type=stash_type, buffer_bytes=100)
    assert stash.routed_experts.tolist() == [0, 1, 2, 3]
    store.delete_many([ref])


def test_a_taken_name_is_refused(fresh):
    class Imposter(MemoryBackend):
        pass

    with pytest.raises(ConfigError, match="'memory' is taken; known backends"):
        register_backend(Imposter)
    registry.get_codec("raw")
    assert register_codec(RawCodec) is RawCodec, "registering the same class again changes nothing"


@pytest.mark.parametrize("thing", [int, "memory", type("NoName", (MemoryBackend,), {"name": ""})])
def test_what_is_no_backend_is_refused(fresh, thing):
    with pytest.raises(ConfigError, match="expected a Backend class with a name"):
        register_backend(thing)


def test_an_entry_point_is_imported_on_first_use_only(fresh):
    fresh(later=["no_such_module:Backend"])
    assert "later" in registry.backend_names()
    assert create_backend("memory") is not None
    with pytest.raises(ConfigError, match="cannot be imported from 'no_such_module:Backend'"):
        create_backend("later")


def test_two_packages_that_claim_one_name_are_told_apart_when_it_is_used(fresh):
    fresh(twice=["first:A", "second:B"], memory=["third:C"])
    with pytest.raises(ConfigError, match="'twice' is claimed by first:A and second:B"):
        create_backend("twice")
    with pytest.raises(ConfigError, match="'memory' is claimed by"):
        registry._backends._load("memory")


def test_an_entry_point_to_another_class_is_refused(fresh):
    fresh(other=["radix_transfer_plugins.codecs.raw:RawCodec"])
    with pytest.raises(ConfigError, match="registered as backend 'other' but is"):
        create_backend("other")


def test_a_missing_optional_dependency_prints_its_install_command(fresh):
    @register_backend
    class Needy(MemoryBackend):
        name = "needy"

        @classmethod
        def from_config(cls, config):
            raise ModuleNotFoundError("No module named 'needed'", name="needed")

    with pytest.raises(
        ConfigError, match=r"needs the module 'needed'.*pip install 'radix-transfer-plugins\[needy\]'"
    ):
        create_backend("needy")


def test_public_names_are_pinned():
    assert sorted(radix_transfer_plugins.__all__) == [
        *("FieldSpec", "OutputStore", "StoreRef", "TokenOutputStash", "create_backend"),
        *("register_backend", "register_codec", "token_output_codecs"),
    ]


HEAVY = ("torch", "sglang", "vllm", "ray", "mooncake", "transformers", "pytest", "hypothesis")


def test_importing_every_module_loads_msgspec_and_numpy_only():
    code = f"""
import importlib, pathlib, sys
import radix_transfer_plugins
root = pathlib.Path(radix_transfer_plugins.__path__[0])
paths = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
# The suites for third parties are the one part that needs pytest.
names = [".".join(path.parts) for path in paths if "testing" not in path.parts]
assert len(names) > 15, names
for name in names:
    importlib.import_module(name)
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
loaded = sys.modules.items()
files = {{name.partition(".")[0]: str(getattr(module, "__file__", "")) for name, module in loaded}}
installed = {{name for name, file in files.items() if "site-packages" in file and not name.startswith("_")}}
# msgspec looks for typing_extensions, and does without it.
assert installed <= {{"radix_transfer_plugins", "msgspec", "numpy", "typing_extensions"}}, installed
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_built_in_names_work_from_a_plain_path_without_installation():
    source = radix_transfer_plugins.__path__[0].rpartition("/")[0]
    code = f"""
import sys
import importlib.metadata
importlib.metadata.entry_points = lambda **_: ()
sys.path.insert(0, {source!r})
from radix_transfer_plugins import create_backend, registry
create_backend("memory").close()
assert registry.backend_names() == ["memory", "mooncake", "shared_memory"]
assert registry.get_codec("positions").name == "positions"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""radix-store: its output, that it removes nothing unasked, and how it fails."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import uuid

import numpy as np
import pytest

from radix_transfer_plugins import OutputStore, TokenOutputStash, create_backend
from radix_transfer_plugins.backends.base import BackendStats
from radix_transfer_plugins.backends.memory import MemoryBackend
from radix_transfer_plugins.cli import EPILOG, _parser, main

ROWS = np.arange(24, dtype=np.int32).reshape(3, 4, 2)


@pytest.fixture
def config():
    return json.dumps({"name": uuid.uuid4().hex, "key_prefix": "run-1"})


@pytest.fixture
def store(config):
    store = OutputStore(create_backend("memory", config))
    yield store
    store.delete_objects(older_than_s=0)
    store.close()


@pytest.fixture
def ref(store):
    stash = TokenOutputStash(routed_experts=ROWS, sampling_mask_lengths=np.array([2, 1], np.int32))
    (ref,) = store.put_many([stash], start_rows=[{"routed_experts": 5}])
    return ref


@pytest.fixture
def run(config, capsys):
    def run(command, *arguments):
        status = main([command, "--backend", "memory", "--config", config, *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_stat_counts_the_store_and_what_lies_below_the_prefix(run, store, ref):
    store.backend.put_batch([("other/a", bytes(10))])
    status, out, _ = run("stat", "--json")
    figures = json.loads(out)
    assert status == 0
    assert (figures["objects"], figures["used_bytes"]) == (3, 96 + 8 + 10)
    assert (figures["key_prefix"], figures["prefix_objects"], figures["prefix_bytes"]) == ("run-1", 2, 104)
    _, out, _ = run("stat")
    assert "prefix         104 bytes\n" in out
    assert "prefix_oldest  0s ago\n" in out
    store.backend.delete_batch(["other/a"])


def test_list_prints_size_and_key_of_each_object(run, ref):
    status, out, _ = run("list")
    assert status == 0
    assert [line.split() for line in out.splitlines()] == [
        ["0s", "96", "bytes", f"{ref.key}/routed_experts"],
        ["0s", "8", "bytes", f"{ref.key}/sampling_mask_lengths"],
    ]
    _, out, _ = run("list", "--json")
    assert {info["key"]: info["stored_bytes"] for info in json.loads(out)} == {
        f"{ref.key}/routed_experts": 96,
        f"{ref.key}/sampling_mask_lengths": 8,
    }
    assert json.loads(run("list", "--json", "--older-than", "1h")[1]) == []
    assert json.loads(run("list", "--json", "--key-prefix", "run-2")[1]) == []


def test_gc_removes_nothing_without_delete(run, store, ref):
    status, out, _ = run("gc", "--older-than", "0s")
    assert status == 0
    assert "would remove 2 objects, 104 bytes; nothing was removed, add --delete to do so" in out
    assert len(list(store.list_objects())) == 2


def test_gc_removes_what_is_old_enough_below_the_prefix_only(run, store, ref):
    store.backend.put_batch([("run-10/a", b"x")])
    assert json.loads(run("gc", "--older-than", "2h", "--delete", "--json")[1]) == {"found": [], "removed": 0}
    status, out, _ = run("gc", "--older-than", "0", "--delete")
    assert status == 0
    assert "removed 2 objects" in out
    assert [info.key for info in store.backend.list("")] == ["run-10/a"]
    store.backend.delete_batch(["run-10/a"])


def test_gc_needs_an_age(run, ref):
    with pytest.raises(SystemExit) as caught:
        run("gc", "--delete")
    assert caught.value.code == 2


def test_cat_prints_shapes_and_values_of_json_text_a_file_or_standard_input(run, ref, tmp_path, monkeypatch):
    text = json.dumps(ref.to_builtins())
    status, out, _ = run("cat", text)
    assert status == 0
    assert "routed_experts: int32 [3, 4, 2] rows [5, 8) raw 96 bytes" in out
    assert "[22 23]" in out
    file = tmp_path / "ref.json"
    file.write_text(text)
    assert run("cat", str(file))[1] == out
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert run("cat", "-")[1] == out


def test_cat_prints_one_json_object_a_field_and_only_the_fields_asked_for(run, ref):
    _, out, _ = run("cat", json.dumps(ref.to_builtins()), "--json", "--field", "sampling_mask_lengths")
    printed = json.loads(out)
    assert (printed["field"], printed["values"]) == ("sampling_mask_lengths", [2, 1])


def test_cat_writes_npy_files(run, ref, tmp_path):
    status, out, _ = run("cat", json.dumps(ref.to_builtins()), "--npy", str(tmp_path / "arrays"))
    assert status == 0
    assert "[22 23]" not in out
    assert np.array_equal(np.load(tmp_path / "arrays" / "routed_experts.npy"), ROWS)


def test_failures_say_why_on_stderr_and_exit_with_1(run, ref, store, tmp_path):
    text = json.dumps(ref.to_builtins())
    for arguments, message in [
        (("cat", "{"), "expected a reference as JSON text"),
        (("cat", "{}"), "missing required field"),
        (("cat", str(tmp_path / "absent.json")), "absent.json"),
        (("cat", text, "--field", "nothing"), "holds no field 'nothing'; it holds: routed_experts"),
        (("cat", text, "--key-prefix", "run-2"), "lies outside this store's key prefix 'run-2'"),
        (("cat", text, "--buffer-bytes", "10"), "more than buffer_bytes 10"),
        (("list", "--key-prefix", "/"), "key_prefix"),
    ]:
        status, out, err = run(*arguments)
        assert (status, out) == (1, "")
        assert err.startswith("radix-store: ")
        assert message in err
    store.delete_many([ref])
    status, _, err = run("cat", text)
    assert status == 1
    assert ref.key in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--backend", "memory", "--older-than", "soon"], "2h"),
        (["cat", "--backend", "memory", "{}", "--buffer-bytes", "big"], "1gb"),
        (["list"], "--backend"),
        (["explode"], "invalid choice"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_examples_of_the_help_are_commands_that_parse():
    examples = [line.strip() for line in EPILOG.splitlines() if line.startswith("  radix-store ")]
    parsed = [_parser().parse_args(shlex.split(example)[1:]).run.__name__ for example in examples]
    assert parsed == ["stat", "list_objects", "collect_garbage", "collect_garbage", "cat"]


def test_cat_takes_the_backend_from_the_reference(config, ref, capsys):
    assert main(["cat", "--config", config, json.dumps(ref.to_builtins())]) == 0
    assert "[22 23]" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["stat"], ["list"], ["gc", "--older-than", "1h", "--delete"]])
def test_a_mistyped_space_is_refused_with_those_that_are_there_and_not_made(command, capsys):
    there, mistyped = f"test-{uuid.uuid4().hex}", f"test-{uuid.uuid4().hex}"
    backend = create_backend("shared_memory", {"space": there})
    try:
        config = json.dumps({"space": mistyped})
        assert main([*command, "--backend", "shared_memory", "--config", config]) == 1
        assert there in capsys.readouterr().err
        assert not os.path.exists(f"/dev/shm/radix-{mistyped}")
        assert main([*command, "--backend", "shared_memory", "--config", json.dumps({"space": there})]) == 0
    finally:
        backend.close()
        shutil.rmtree(f"/dev/shm/radix-{there}")


def test_a_reader_that_closes_the_pipe_early_is_no_error(tmp_path):
    store = OutputStore(create_backend("shared_memory", {"directory": str(tmp_path / "s")}), key_prefix="a")
    # More than a pipe holds.
    store.backend.put_batch([(f"a/{'k' * 200}{number}", b"x") for number in range(600)])
    store.close()
    command = os.path.join(os.path.dirname(sys.executable), "radix-store")
    config = json.dumps({"directory": str(tmp_path / "s"), "key_prefix": "a"})
    listing = [command, "list", "--backend", "shared_memory", "--config", config]
    process = subprocess.Popen(listing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("\n")
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 0
    process.stderr.close()


def test_what_a_native_library_writes_to_stderr_is_shown_only_if_asked(monkeypatch, config, capfd):
    def stats(self):
        os.write(2, b"I1201 native line\n")
        return BackendStats(0, 0, None)

    monkeypatch.setattr(MemoryBackend, "stats", stats)
    assert main(["stat", "--backend", "memory", "--config", config]) == 0
    assert capfd.readouterr().err == ""
    assert main(["stat", "--backend", "memory", "--config", config, "--verbose"]) == 0
    assert capfd.readouterr().err == "I1201 native line\n"
    assert main(["stat", "--backend", "memory", "--config", "{}}"]) == 1
    assert capfd.readouterr().err.startswith("radix-store: ")


def test_unknown_backend_lists_the_known_ones(capsys):
    assert main(["stat", "--backend", "redis"]) == 1
    assert "known backends: memory, mooncake, shared_memory" in capsys.readouterr().err


def test_the_installed_command_runs():
    command = os.path.join(os.path.dirname(sys.executable), "radix-store")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert all(name in done.stdout for name in ("stat", "list", "gc", "cat", "--delete"))

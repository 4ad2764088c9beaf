"""A version of the weights reaches the whole fleet or nobody."""

import asyncio

import pytest
import torch

from radix_rl.errors import ConfigurationError, EngineDeadError, WeightUpdateError
from radix_rl.testing import ScriptedEngine, wait_for
from radix_rl.weights.sync import WeightSynchronizer, named_weights
from radix_rl.weights.transports.memory import MemoryTransport


@pytest.fixture
def fleet():
    return [ScriptedEngine() for _ in range(3)]


def synchronizer(fleet, bucket_bytes=48) -> WeightSynchronizer:
    return WeightSynchronizer(fleet, MemoryTransport(), bucket_bytes=bucket_bytes)


async def test_every_engine_gets_every_tensor_while_paused(fleet, named_tensors):
    metrics = await synchronizer(fleet).sync(1, named_tensors)
    for engine in fleet:
        assert [name for name, *_ in engine.calls] == [
            "pause", "begin_weight_update", *["update_weights"] * 3, "commit_weight_update", "resume",
        ]  # fmt: skip
        assert engine.version == "1"
        assert not engine.paused
        assert {name: tensor.tolist() for name, tensor in engine.weights.items()} == {
            name: tensor.tolist() for name, tensor in named_tensors
        }
    assert metrics["weights/buckets"] == 3
    assert metrics["weights/sent_bytes"] == 112
    assert metrics["weights/sync_s"] >= metrics["weights/pack_s"] + metrics["weights/send_s"]


@pytest.mark.parametrize("bucket_bytes", [1, 16, 33, 64, 1 << 20])
async def test_the_result_does_not_depend_on_the_bucket_size(named_tensors, bucket_bytes):
    engine = ScriptedEngine()
    await synchronizer([engine], bucket_bytes).sync(1, named_tensors)
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in engine.weights.items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in named_tensors
    }


@pytest.mark.parametrize("fails_at", ["pause", "begin_weight_update", "update_weights"])
async def test_a_failure_before_the_commit_leaves_the_old_version_everywhere(fleet, named_tensors, fails_at):
    sync = synchronizer(fleet)
    await sync.sync(1, named_tensors)
    before = [dict(engine.weights) for engine in fleet]
    fleet[1].failures[fails_at] = EngineDeadError("unplugged")
    with pytest.raises(EngineDeadError, match="unplugged"):
        await sync.sync(2, [("a", torch.ones(2, 3))])
    for engine, weights in zip(fleet, before, strict=True):
        assert engine.version == "1"
        assert engine.weights == weights
        assert engine.staged is None
        assert not engine.paused
    assert sync.version == 1


async def test_a_source_that_fails_leaves_the_old_version_everywhere(fleet, named_tensors):
    def broken():
        yield from named_tensors
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await synchronizer(fleet).sync(1, broken())
    assert {(engine.version, engine.paused, engine.staged) for engine in fleet} == {("0", False, None)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
async def test_weights_that_are_not_finite_are_named_and_reach_no_engine(value, dtype, fleet, named_tensors):
    sync = synchronizer(fleet)
    await sync.sync(1, named_tensors)
    broken = torch.ones(4, 4, dtype=dtype)
    broken[2] = value
    with pytest.raises(WeightUpdateError, match=r"weight 'broken' .* not finite"):
        await sync.sync(2, [("whole", torch.ones(3)), ("broken", broken), ("later", broken)])
    assert {(engine.version, engine.paused, engine.staged) for engine in fleet} == {("1", False, None)}
    await sync.sync(2, named_tensors)
    assert {engine.version for engine in fleet} == {"2"}


async def test_a_cancelled_update_is_dropped_everywhere(fleet, named_tensors):
    sending = asyncio.Event()

    async def hang(bucket):
        sending.set()
        await asyncio.Event().wait()

    fleet[2].update_weights = hang
    task = asyncio.create_task(synchronizer(fleet).sync(1, named_tensors))
    await sending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {(engine.version, engine.paused, engine.staged) for engine in fleet} == {("0", False, None)}


async def test_an_update_cancelled_at_its_commit_is_committed_everywhere(fleet, named_tensors):
    commit, allowed = fleet[2].commit_weight_update, asyncio.Event()

    async def late(version):
        await allowed.wait()
        await commit(version)

    fleet[2].commit_weight_update = late
    task = asyncio.create_task(synchronizer(fleet).sync(1, named_tensors))
    await wait_for(lambda: fleet[0].version == "1", "the first engine's commit")
    task.cancel()
    allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {(engine.version, engine.paused, engine.staged) for engine in fleet} == {("1", False, None)}


async def test_an_engine_that_cannot_commit_gives_its_weights_up(fleet, named_tensors):
    fleet[1].failures["commit_weight_update"] = EngineDeadError("unplugged")
    with pytest.raises(WeightUpdateError, match="1 of 3 engines could not commit weight version 1"):
        await synchronizer(fleet).sync(1, named_tensors)
    assert [engine.asleep for engine in fleet] == [set(), {"weights"}, set()]
    assert not any(engine.paused for engine in fleet)


async def test_no_commit_at_all_keeps_the_old_version(fleet, named_tensors):
    for engine in fleet:
        engine.failures["commit_weight_update"] = EngineDeadError("unplugged")
    with pytest.raises(WeightUpdateError, match="stays in force"):
        await synchronizer(fleet).sync(1, named_tensors)
    assert not any(engine.asleep or engine.paused for engine in fleet)


async def test_versions_only_grow(fleet, named_tensors):
    sync = synchronizer(fleet)
    await sync.sync(5, named_tensors)
    with pytest.raises(WeightUpdateError, match="expected more than 5, got 5"):
        await sync.sync(5, named_tensors)


def test_an_engine_that_takes_no_such_transport_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"'memory', but ScriptedEngine takes weights by ipc, broadcast"
    ):
        synchronizer([ScriptedEngine(weight_transports=("ipc", "broadcast"))])


def test_tied_weights_are_sent_once_and_buffers_too():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("bias", torch.ones(2))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    model = Tied()
    assert sorted(name for name, _ in named_weights(model)) == ["bias", "embed.weight"]
    assert not any(tensor.requires_grad for _, tensor in named_weights(model))

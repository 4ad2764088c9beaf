"""One response's routed experts, from the engine's array to the trainer's, inline and through the store."""

import base64
import json
import statistics
import tempfile
from collections.abc import Callable

import msgspec
import numpy as np

from benchmarks.result import Result, at_least, at_most, shown
from benchmarks.store.inputs import NUM_EXPERTS, routed_experts
from benchmarks.timing import cpu_seconds, median_ratio, take_turns
from radix_transfer_plugins import OutputStore, StoreRef, TokenOutputStash, create_backend
from radix_transfer_plugins.backends.mooncake.local import LocalMooncake
from radix_transfer_plugins.codecs.narrow import NarrowCodec

REPETITIONS = 100


def run() -> list[Result]:
    rows = routed_experts()
    answers: dict[str, bytes] = {}

    def inline_with(
        dump: Callable[[object], bytes], load: Callable[[bytes], dict], name: str
    ) -> Callable[[], None]:
        def both_ends() -> None:
            text = base64.b64encode(rows.tobytes()).decode("ascii")
            answers[name] = dump({"text": "", "meta_info": {"routed_experts": text, "shape": rows.shape}})
            meta = load(answers[name])["meta_info"]
            back = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(meta["shape"])
            assert back[-1, -1, -1] == rows[-1, -1, -1]

        return both_ends

    def through(store: OutputStore, name: str) -> Callable[[], None]:
        def both_ends() -> None:
            (ref,) = store.put_many([TokenOutputStash(routed_experts=rows)])
            answers[name] = json.dumps(
                {"text": "", "meta_info": {"output_store_ref": ref.to_builtins()}}
            ).encode()
            found = StoreRef.from_builtins(json.loads(answers[name])["meta_info"]["output_store_ref"])
            (stash,) = store.read_many(
                [(found, ["routed_experts"])], stash_type=TokenOutputStash, buffer_bytes=1 << 30
            )
            assert stash.routed_experts is not None
            assert stash.routed_experts[-1, -1, -1] == rows[-1, -1, -1]
            store.delete_many([found])

        return both_ends

    codecs = {"routed_experts": NarrowCodec(NUM_EXPERTS)}
    with (
        LocalMooncake() as master,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="radix-bench-") as space,
    ):
        stores = {
            "memory": OutputStore(create_backend("memory"), codecs=codecs),
            "shared_memory": OutputStore(
                create_backend("shared_memory", {"directory": space}), codecs=codecs
            ),
            "mooncake": OutputStore(create_backend("mooncake", master.backend_config()), codecs=codecs),
        }
        assert master.segment_host is not None
        servers = [master.process.pid, master.segment_host.process.pid]
        cases = {
            "inline": inline_with(lambda body: json.dumps(body).encode(), json.loads, "inline"),
            "inline_msgspec": inline_with(msgspec.json.encode, msgspec.json.decode, "inline_msgspec"),
        }
        cases |= {name: through(store, name) for name, store in stores.items()}
        seconds = take_turns(cases, repetitions=REPETITIONS, meter=lambda case: cpu_seconds(case, servers))
        (ref,) = stores["memory"].put_many([TokenOutputStash(routed_experts=rows)])
        for store in stores.values():
            store.close()
    results = [
        shown(f"response path: CPU, {name}", 1e3 * statistics.median(values), "ms, both ends")
        for name, values in seconds.items()
    ]
    over = {name: median_ratio(seconds["inline"], seconds[name]) for name in stores}
    results += [
        shown("response path: response, inline", len(answers["inline"]), "bytes"),
        shown("response path: response, through the store", len(answers["mooncake"]), "bytes"),
        at_most(
            "response path: stored bytes of int32",
            ref.fields["routed_experts"].stored_bytes / rows.nbytes,
            "ratio",
            0.26,
        ),
        at_least("response path: CPU, inline / shared_memory", over["shared_memory"], "ratio", 15),
        at_least("response path: CPU, inline / mooncake", over["mooncake"], "ratio", 5),
        shown("response path: CPU, inline / memory", over["memory"], "ratio"),
    ]
    return results

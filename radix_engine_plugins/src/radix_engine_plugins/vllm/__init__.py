"""The output store for an unmodified vLLM.

It is found through vLLM's entry point groups `vllm.general_plugins` and `vllm.endpoint_plugins`.

All of it runs where a request's answer is built, the API server or the caller's own process; the scheduler
and the workers are vLLM's. There, rows arrive as arrays, and serialising them is what the store saves.

plugin.py          entry point of every process: version check, which seams are used
shapes.json        what the functions and classes that are hooked look like in the versions that were checked
seams.py           wraps vLLM's functions and refuses an engine whose seams are gone
settings.py        `additional_config["output_store"]`, and what is refused at launch
opt_in.py          which requests opted in, and which of them cannot be met
request_state.py   arrays leave the inline path
outputs.py         one completion's arrays, and the stash made of them
routing_layers.py  worker method: which layers route
session.py         what this engine's connection to the store adds, and the seams that open it
async_engine.py    AsyncLLM: put, then answer
offline.py         LLM: put while other requests run, then answer
endpoint.py        entry point of the API server: `/server_info`, handover, the three routes
answers.py         the reference in the answers of these routes
"""

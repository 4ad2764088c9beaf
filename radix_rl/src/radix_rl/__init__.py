"""RL post-training with verified replay: engines, rollout, training and weight sync over an output store.

From the bottom up, which is the order in which folders may import each other:

errors.py         every error that this package raises on purpose
types.py          requests and answers of an engine
concurrency.py    waiting for threads, coroutines and tasks
openmp_pool.py    the threads that OpenMP keeps for a thread that is done with torch
addresses.py      network addresses and sockets that listen on one
model_layers.py   where a Hugging Face model keeps its decoder layers
stop_strings.py   whether an answer has reached a stop string
buckets/          how weights lie in bytes
routers/          MoE routers: what they chose, and their weights for it
config/           the settings and their defaults
engines/          the engine contract, the embedded and the remote engine, pools
weights/          new weights from the trainer to the engines
rollout/          problems in, scored samples out
observe/          metrics, trackers, progress, report
launch/           what a run or a command starts and checks
server/           the embedded engine behind SGLang's and OpenAI's routes
train/            a run: its loop, its ranks, its objective, replay, checkpoints
testing/          the suite of the engine contract, a scripted engine, tiny models
cli/              the command line
"""

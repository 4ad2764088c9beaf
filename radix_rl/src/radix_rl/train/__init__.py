"""Training: from a configuration to updated weights.

run.py           builds a run from its configuration, runs it and takes it down
loop.py          the steps of a run: generate, score, plan, train, sync, evaluate
plan/            a step's samples as minibatches for ranks, with advantages and loss scales
advantages/      advantage estimators, one file each
objective/       log-probabilities, policy losses, corrections, KL penalty, mismatch
replay/          the engine's recorded choices in the trainer's forward pass
worker.py        one rank's policy and optimizer: samples to optimizer steps
rank_trainer.py  one rank from references in the store to updated weights
distributed.py   several ranks as processes, sharded with FSDP2
collectives.py   sums and maxima over the ranks
batch.py         samples as padded tensors
policy.py        the models that a trainer computes with
checkpoint.py    checkpoints: written whole, found, restored
schedule.py      learning rate by optimizer step
interrupt.py     an event loop that Ctrl-C ends in good order
"""

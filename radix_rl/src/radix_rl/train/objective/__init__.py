"""The objective: from logits to the loss of a token.

logprobs.py    log-probabilities under the distribution that the engine sampled from
losses/        policy losses, one file each
kl.py          the KL penalty to the reference model
correction.py  weights for what still differs between engine and trainer
mismatch.py    how far log-probabilities of rollout and trainer differ
"""

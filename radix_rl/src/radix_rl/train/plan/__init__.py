"""The plan of a step: what each minibatch and each rank trains on.

step_plan.py    scored samples to minibatches, with advantage and loss scale of each sample
loss_scales.py  the weight of a sample's tokens by `algorithm.reduction`
share_out.py    samples to minibatches, and a minibatch's samples to ranks
"""

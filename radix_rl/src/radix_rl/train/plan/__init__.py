"""The plan of a step: what each minibatch and each rank trains on.

step_plan.py    scored samples to minibatches, with advantage and loss scale of each sample
loss_scales.py  the weight of a sample's tokens by `algorithm.reduction`
no_signal.py    warns when steps in a row cannot change the policy
share_out.py    samples to minibatches, and a minibatch's samples to ranks
"""

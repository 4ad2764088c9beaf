"""MoE routers: how the engine records the experts they choose, and how the trainer weights recorded ones.

base.py                   the contract with both sides
registry.py               the kinds by name; more are found through the entry point group `radix_rl.routers`
find.py                   the kind and the module of each layer of a model
experts_call.py           any router whose experts are called with the chosen ids; recorded, not replayed
known_classes.py          what the kinds below share: told by class name, recorded at the call of the experts
softmax_then_choose.py    Mixtral, Qwen-MoE, OLMoE and others
softmax_then_scale.py     DeepSeek-V2
softmax_over_floor.py     ERNIE 4.5
choose_then_softmax.py    gpt-oss
sigmoid_then_scale.py     DeepSeek-V3, GLM and others
sigmoid_then_normalise.py MiniMax-M2
router_scores.py          Llama 4, whose router returns a score for every expert; recorded, not replayed
"""

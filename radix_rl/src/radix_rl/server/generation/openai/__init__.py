"""OpenAI's routes over the same exchange as `/generate`.

routes.py          models, completions, chat
bodies.py          their bodies, translated into that of `/generate`
chat_template.py   messages to token ids through the model's own template
renderers.py       their answers, whole and as events
"""

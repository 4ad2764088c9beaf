"""Requests that generate: from a body to the bytes of its answer.

route.py         `/generate`
body.py          its body as a call; here prompts become token ids
sampling.py      its `sampling_params`
exchange.py      one request from its parsed body to its last byte
renderer.py      answers of `/generate`, whole and as events
answer.py        `meta_info` of an answer
text.py          token ids to text, of a whole answer and of one that grows
token_bytes.py   the bytes of one token
openai/          OpenAI's routes over the same exchange
"""

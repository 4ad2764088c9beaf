"""The engine behind HTTP: a server of SGLang, vLLM or this project.

engine.py      `RemoteEngine`, the contract
api.py         the server's requests and answers as JSON
client.py      HTTP calls and their errors
retry.py       which calls are tried again, and when
liveness.py    whether the server still answers
weights.py     weight sync by buckets, update groups and folders
"""

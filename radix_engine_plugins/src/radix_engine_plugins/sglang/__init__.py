"""The output store for an unmodified SGLang, loaded through the entry point group `sglang.srt.plugins`.

plugin.py          entry point: version check, which hooks which process gets
shapes.json        what the functions and classes that are hooked look like in the versions that were checked
hooks.py           registers hooks and refuses a launch when one does not fit
settings.py        what the operator asked for, and what is refused at launch
flags.py           the two flags, on the command line and for `sglang.Engine`
frontend.py        all hooks of a process that talks to clients
request_fields.py  the request field, on /generate, chat and `sglang.Engine`
marking.py         tokenizer -> scheduler: which requests opted in; warm-ups of n > 1
capture.py         scheduler: rows leave the inline path
wire.py            scheduler -> tokenizer: the packed rows
receive.py         tokenizer: rows and masks arrive
outputs.py         one request's outputs, and the stash made of them
finish.py          put, then answer
handover.py        whose object is it: discards what no client received
chat.py            the reference in chat answers
server_info.py     says that the store is on
session.py         what this engine's connection to the store adds
worker_app.py      the HTTP app of `--tokenizer-worker-num N`
"""

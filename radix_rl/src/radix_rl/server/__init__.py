"""The HTTP face of an engine: SGLang's and OpenAI's routes. Start reading at app.py, then generation/.

app.py              the application: routes, keys, error answers
runner.py           runs it on a socket until a signal
connections.py      how many connections there may be, and how long a client may take to send
auth.py             bearer keys
settings.py         what the command line decided
state.py            what the routes share
metrics.py          Prometheus metrics of the server itself
http.py             JSON bodies and their size limit, answers, errors
items.py            what a generation route asks for, and the engine requests it expands to
side_process.py     processes for long work on what clients send
control_routes.py   abort, pause, cache, memory
info_routes.py      health, model, server, metrics
generation/         requests that generate
weights/            weight updates
"""

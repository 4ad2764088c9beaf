"""The command line, `radix-rl`.

main.py       the commands, and what an error looks like
options.py    options made from the fields of a section of the configuration
serve.py      `radix-rl serve`
gateway.py    `radix-rl gateway`
store.py      `radix-rl store`
config.py     `radix-rl config`
going_on.py   what an interrupted run kept, and the command that goes on
"""

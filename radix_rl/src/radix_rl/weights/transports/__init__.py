"""Ways that weights travel from trainer to engines.

base.py        the contract of every transport
factory.py     the transports by the name of their setting
memory.py      to engines in this process: the bucket itself
http.py        to our server: a bucket as the body of a request
broadcast.py   to servers: a bucket over a torch process group
disk.py        to servers: a checkpoint in a folder that they see

To add one:

1. Write a file here with a `WeightTransport[P]` that has a `name` and `send`. P, its `needs`, is `Engine` or
   a protocol of what it asks of engines beyond that, in `radix_rl.engines.weight_protocols`.
2. Add its line to `TRANSPORTS` in factory.py and its name to `WeightsConfig.transport`.
3. Name it in `capabilities.weight_transports` of each engine that has the methods of P.
4. Add it to the parametrised tests of test_transports.py: the same bits are in force whatever the transport.
"""

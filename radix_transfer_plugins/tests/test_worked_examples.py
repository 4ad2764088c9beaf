"""The worked examples in docstrings give what they say."""

import doctest

from radix_transfer_plugins.codecs.positions import codec


def test_the_example_of_the_positions_codec():
    assert doctest.testmod(codec) == (0, 2)

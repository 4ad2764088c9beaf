"""Every error this package raises.

OutputStoreError
├── RefError (ValueError)                  a malformed reference, or one that asks for what is not known here
│   └── KeyOutsidePrefixError (PermissionError)   a reference to a key that the reader is not allowed to touch
├── ConfigError (ValueError)               a backend, codec or store that is configured wrongly
├── CodecError (ValueError)                an array that its codec cannot store without loss
├── FieldMissingError (KeyError)           a field asked for that the reference does not hold
├── ReadBufferError (ValueError)           a field larger than the read buffer
├── ReleasedViewError (ValueError)         use of a view after its lease was released
├── KeyExistsError (FileExistsError)       a put to a key that is taken
├── ObjectLostError (LookupError)          a key that the store no longer holds
├── CorruptObjectError (ValueError)        bytes that fail their checksum or their length
├── StoreFullError (OSError)               no room, even after waiting
└── StoreUnavailableError (ConnectionError)  the store does not answer
"""


class OutputStoreError(Exception):
    """Root of this package's errors."""

    def __str__(self) -> str:
        # KeyError would print the message's repr.
        return str(self.args[0]) if self.args else ""


class RefError(OutputStoreError, ValueError): ...


class KeyOutsidePrefixError(RefError, PermissionError): ...


class ConfigError(OutputStoreError, ValueError): ...


class CodecError(OutputStoreError, ValueError): ...


class FieldMissingError(OutputStoreError, KeyError): ...


class ReadBufferError(OutputStoreError, ValueError): ...


class ReleasedViewError(OutputStoreError, ValueError): ...


class KeyExistsError(OutputStoreError, FileExistsError): ...


class ObjectLostError(OutputStoreError, LookupError): ...


class CorruptObjectError(OutputStoreError, ValueError): ...


class StoreFullError(OutputStoreError, OSError): ...


class StoreUnavailableError(OutputStoreError, ConnectionError): ...

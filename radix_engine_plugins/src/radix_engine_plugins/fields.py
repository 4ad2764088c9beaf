"""Names that clients see, the same at every engine; the reference's is `REF_KEY` of the store."""

OPT_IN = "return_outputs_via_store"
"""The request field: hand replay outputs out by a reference."""

STORE = "output_store"
"""Key of the store in `/server_info`, and of its settings where an engine reads settings by key."""

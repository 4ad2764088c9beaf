"""OpenAI's routes over the same exchange as `/generate`."""

"""The HTTP face of an engine: SGLang's and OpenAI's routes. Start reading at app.py, then exchange.py."""

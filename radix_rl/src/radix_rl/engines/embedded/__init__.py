"""The engine that runs inside this process: PyTorch and transformers, on a CPU or a GPU."""

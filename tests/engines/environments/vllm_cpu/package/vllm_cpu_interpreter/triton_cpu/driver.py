from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """The one active driver; answers questions about the device and launches nothing."""

    def __init__(self):
        """The base class would look for a compiler of launchers."""

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget(backend="cpu", arch=0, warp_size=1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        import torch

        return torch.cpu

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        """There is one."""

    def get_current_stream(self, device=None):
        return 0

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self):
        return None

    def clear_cache(self, cache):
        """There is none."""

    def launcher_cls(self, *args, **kwargs):
        raise NotImplementedError("kernels run in the interpreter; set TRITON_INTERPRET=1")

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class ReferenceCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU platform for SGLang that asks for no kernels.

    SGLang's own wants some that its wheel for CUDA does not hold.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def init_backend(self) -> None:
        """The host buffer of captured experts is pinned memory on a GPU; here host memory is the device's."""
        from sglang.srt.mem_cache.pool_host import common

        def allocate(shape, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
            return allocator.allocate(shape, dtype=dtype, device=device)

        common.ALLOC_MEMORY_FUNCS["cpu"] = allocate

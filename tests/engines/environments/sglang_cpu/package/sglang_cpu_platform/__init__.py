"""SGLang's plugin seam for platforms: a CPU on which every operation takes its PyTorch reference path."""


def platform_class() -> str:
    return "sglang_cpu_platform.platform.ReferenceCpuPlatform"

"""vLLM's Model Runner V2 on a CPU: its Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1).

Routed experts and sampling masks exist in that runner only, and the wheel for CPUs uses the older one. Two
functions do not work there and are replaced by what vLLM has beside them.
"""

_MARK = "cpu_interpreter"


def activate() -> None:
    """Entry point of group `vllm.general_plugins`; may be called more than once in a process."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.v1.sample.ops import topk_topp_sampler

    # The interpreter crashes in this kernel. The function in PyTorch gives the same.
    def top_k_top_p(logits, k, p):
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    topk_topp_sampler.apply_top_k_top_p_triton = top_k_top_p
    _pack_updated_experts(UnquantizedFusedMoEMethod)


def _pack_updated_experts(method_class: type) -> None:
    """Pack experts' weights again when they are loaded again.

    On CPUs vLLM packs them for its kernel when they are first loaded only: the kernel would read new weights
    as if they were packed.
    """
    if hasattr(method_class, _MARK):
        return
    setup_kernel = method_class._setup_kernel

    def setup_and_pack(self, layer, w13, w2):
        loaded_before = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if loaded_before:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method_class._setup_kernel = setup_and_pack
    setattr(method_class, _MARK, True)

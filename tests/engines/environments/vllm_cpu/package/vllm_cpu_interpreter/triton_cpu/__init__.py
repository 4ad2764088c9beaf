"""A Triton backend by which Triton takes this machine for a target; kernels run in its interpreter only."""

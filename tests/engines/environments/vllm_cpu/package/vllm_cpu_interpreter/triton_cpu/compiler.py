from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Compiles nothing."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        return options

    def add_stages(self, *args, **kwargs):
        raise NotImplementedError("kernels run in the interpreter; set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        """None are needed."""

    def get_module_map(self):
        return {}

    def pack_metadata(self, metadata):
        return metadata

    def get_codegen_implementation(self, options):
        return {}

"""What runs inside an inference engine: collect replay outputs, write them to the store, clean up."""

"""What a run starts and checks before its first step."""

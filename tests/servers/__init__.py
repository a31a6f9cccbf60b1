"""Real servers on this machine, for tests."""

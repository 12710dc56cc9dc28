"""One instance's state machine: admission, steps, phases, and what it tells others of itself."""

"""One instance live in this process: its threads, lanes, stages and memory."""

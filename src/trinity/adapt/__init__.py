"""Traffic watched beside a pipeline: shifts of demand, and proposals of another placement."""

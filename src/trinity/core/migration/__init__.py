"""Pull migration of image and KV blocks: both sides of a transfer, leases, features held elsewhere (TriInfer 4.3)."""

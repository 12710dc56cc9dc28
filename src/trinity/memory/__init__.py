"""The bytes behind block pools: tensors, native copies, digests."""

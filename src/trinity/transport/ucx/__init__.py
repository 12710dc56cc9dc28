"""UCX through ucxx: a peer's serving thread sends blocks."""

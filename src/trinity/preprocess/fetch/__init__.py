"""Bytes of media: from URLs, files and data: URIs, bounded in size and time."""

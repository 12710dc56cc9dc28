"""From a Request to token ids and pixels, and from tokens back to text."""

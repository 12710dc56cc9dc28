"""Texts: chats to prompts, prompts to token ids, tokens to text, and the grammars that outputs keep to."""

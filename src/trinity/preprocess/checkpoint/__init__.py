"""Files of a checkpoint: config, tokenizer and processor, each checked before a library opens it."""

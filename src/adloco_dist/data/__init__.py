"""Text to token store to sequences by cursor."""

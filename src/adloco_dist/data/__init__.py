"""Data sets that deal cursors to trainers: corpora of text as token ids, and a user's own items and streams."""

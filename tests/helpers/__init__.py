"""What tests share: commands as users type them, corpora, models, and runs on forked ranks."""

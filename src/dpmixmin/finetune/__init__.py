"""Private fine-tuning mechanisms."""

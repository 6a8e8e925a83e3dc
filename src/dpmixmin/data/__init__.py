"""Record tables: one small loader per format, all giving the same Arrow schema."""

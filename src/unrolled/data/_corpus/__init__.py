"""Tokenised corpora: documents read from files, written as shards of ids, and mapped into memory."""

"""Readers of Hugging Face configurations, found by name through the entry-point group ``polyattn.readers``."""

from polyattn_readers.rope import RopeReader

__all__ = ["RopeReader"]

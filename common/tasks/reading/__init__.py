"""Reads files, folders and the Hub as rows, texts and images. No recipe imports it."""

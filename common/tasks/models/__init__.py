"""Models of transformers, from a folder, the Hub or from scratch; their tokenizers, adapters and losses."""

"""How files, folders and the Hub become rows, texts and images. No recipe imports it."""

"""What several kinds of view share: numbers, columns of text, headlines, files that are written whole."""

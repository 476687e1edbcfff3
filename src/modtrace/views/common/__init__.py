"""Holds what several kinds of views share: numbers, columns of text, headlines, atomic writing of files."""

"""What every analysis reads of a recording: its tables joined into columns."""

"""gradaccum inside other training frameworks."""

"""gradaccum for Keras 3."""

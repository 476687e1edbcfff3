"""Statistics of tensors as bytes and numbers: moments, tier 2, fingerprints and samples."""

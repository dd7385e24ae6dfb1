"""What users are told."""

"""What runs a Program on a device."""

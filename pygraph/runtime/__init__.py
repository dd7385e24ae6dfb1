"""Running Programs on a device: recorded regions, their pointers, executables, and the two devices' drivers."""

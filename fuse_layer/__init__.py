"""The overlay: a driver-neutral core that tracks changes and keeps sealed epochs readable, and its drivers."""

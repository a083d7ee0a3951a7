def get_target_compute_version() -> str:
    """Hopper's whatever the device is: chunks of 64, and a backward."""
    return "9.0"

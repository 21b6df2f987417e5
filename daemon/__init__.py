"""The service: supervision of overlay workers, schedule, capture, retention and the control API."""

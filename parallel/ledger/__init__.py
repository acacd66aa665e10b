"""Bytes that a layout holds and sends: predicted, and measured in a real step."""

"""Measurements, each one command. Ratios measured in one run travel; absolute figures are one machine's."""

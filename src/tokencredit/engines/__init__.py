"""Engines that people train with; each needs its own extra, imported where it is used."""

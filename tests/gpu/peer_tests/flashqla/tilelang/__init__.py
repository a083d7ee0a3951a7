"""Stands for TileLang, of which FlashQLA's tests ask the device's compute version."""

from . import contrib

__all__ = ["contrib"]

from . import nvcc

__all__ = ["nvcc"]

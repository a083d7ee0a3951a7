"""This package where users already are: FLA, transformers, and the names of a Blackwell package."""

"""Other people's trainers, made exact: a module for each library, which is imported with it and not before."""

__all__: list[str] = []

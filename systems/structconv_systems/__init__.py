"""Systems of the literature built with structconv: data, models, training, recipes and reports."""

__all__ = ()

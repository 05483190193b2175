"""Fusions, one per file. Their order is the pipeline's (`calc/passes/order.py`), since order is meaning."""

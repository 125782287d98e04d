"""Language models: one graph for prefill, decode and mixed batches, on the pages of `ai.pagoda.PagedAttention`."""

"""The run itself: hooks, access order, prefetch, the gradient path and the update."""

"""Meeting points with other libraries; each is imported only where it is asked for."""

"""How a model is cut into units, how a unit's parameters lie in flat buffers, and the state that each unit is in."""

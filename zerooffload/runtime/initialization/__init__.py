"""Giving values to a model on the meta device, tensor by tensor, so that it never exists whole.

[Note: the same random numbers]
The same seed must give what building the model in memory would have given, bit for bit. Building draws from torch's
generator in an order that only the constructors know, and often twice: a Hugging Face model initialises all weights a
second time when its constructor ends, in another order, and its head is drawn before it is tied.

So building is *recorded*: it runs again on the meta device, where nothing has memory, and every operation is put on a
tape. What a parameter needs is the part of the tape that its last values come from. Its operations are played on real
memory when the parameter is wanted, and everything else is left out; but a draw that nobody needs is drawn and thrown
away in pieces, because what follows continues the generator's sequence. A draw that is wanted later than its turn keeps
the generator's state (5 KB) instead of its values. So parameters can be had in any order, one at a time.

What is recorded:

- a Hugging Face model: its class, called with its config. The copy must have the same modules and the same names,
  shapes and ties; else (the model was changed, or built with other arguments) its own modules are initialised as
  transformers does it, and a warning says that the values may differ.
- any other module: its `reset_parameters`, its children's first. This is what torch's constructors end with, and the
  contract for a class of the user's, too; a container's is called if its constructor does. Modules are taken to be made
  in the order in which they are registered, but for the layers of torch's transformers, which are copies of the first.
  A tied parameter has the values of the module that names it first.

Where this is not known to be what the constructor does, a warning names the module. A model in half precision is taken
to be drawn in its config's dtype if it has that dtype; else it was drawn in the default one, and then rounded.
Parameters that are in memory keep their values, with a warning.
"""

from zerooffload.runtime.initialization.filling import is_on_meta, materialize

__all__ = ["is_on_meta", "materialize"]

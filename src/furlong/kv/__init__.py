"""Keys and values of earlier chunks, with the gradients that later chunks send to them."""

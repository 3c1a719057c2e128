"""Where models come from, how they are loaded, and the text codec. Importing this package loads no tensors."""

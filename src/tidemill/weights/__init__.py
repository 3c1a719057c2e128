"""Published weights as immutable versions: how they are written, how they travel, how a puller knows it got them."""

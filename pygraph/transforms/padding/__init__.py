"""A part of `devicify`: results whose size depends on data are padded to a bound, so that a graph can have them."""

"""Kinds of values: how each is told apart, read and written.

    objects             kinds of objects, and what they hold
    buffers             buffers of numbers, and what a call keeps of each
    holders             how cells, globals, classes, slots are read and written
    container_kinds     how lists, dicts and sets are
    compared            iterators and large containers, which are not copied
    stream_search       random streams in what is not walked
    paths               how the author of a function writes where a value is

Called by `_live` for each call, and by `_transform` and `compat` for facts of classes.
"""

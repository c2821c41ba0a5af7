"""A small byte-level decoder, trained on Python's own documentation with any polyattn backend.

Read in this order: ``model`` (what a model author writes), ``data`` (documents packed into rows), ``train`` (the loop),
``config`` and ``checkpoint``, ``cli`` and ``demo``.
"""

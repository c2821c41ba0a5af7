"""The backend ``online_softmax``: attention in plain torch whose memory is linear in the length."""

from polyattn_online_softmax._backend import OnlineSoftmaxBackend

__all__ = ["OnlineSoftmaxBackend"]

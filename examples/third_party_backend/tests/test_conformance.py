"""Everything that is asked of online_softmax is right, or refused with a reason."""

from polyattn.testing import BackendConformance
from polyattn_online_softmax import OnlineSoftmaxBackend


class TestOnlineSoftmax(BackendConformance):
    backend = "online_softmax"


class TestSmallChunks(BackendConformance):
    """The kit's tensors are short; here they are cut all the same."""

    backend = OnlineSoftmaxBackend().configure({"chunk": 3})

"""What kernels and layers share: the words for features, and the dtype and transform rules of the conventions."""

from polyattn._derivatives import transforming
from polyattn._features import features_of, missing_abilities
from polyattn._reasons import DTYPES
from polyattn._tensors import FLOATING, autocast_dtype

__all__ = ["DTYPES", "FLOATING", "autocast_dtype", "features_of", "missing_abilities", "transforming"]

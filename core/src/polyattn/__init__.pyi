# The types of the names that __init__.py loads lazily; a name of another distribution is typed where that is installed.

from polyattn._backend import AttentionBackend as AttentionBackend
from polyattn._backend import AttentionResult as AttentionResult
from polyattn._backend import BackendBase as BackendBase
from polyattn._backend import PreparedAttention as PreparedAttention
from polyattn._errors import AttentionInputError as AttentionInputError
from polyattn._errors import BackendLoadError as BackendLoadError
from polyattn._errors import BlockedPluginError as BlockedPluginError
from polyattn._errors import ConfigError as ConfigError
from polyattn._errors import DuplicatePluginError as DuplicatePluginError
from polyattn._errors import IncompatiblePluginError as IncompatiblePluginError
from polyattn._errors import LayoutError as LayoutError
from polyattn._errors import PluginNotFoundError as PluginNotFoundError
from polyattn._errors import PolyattnError as PolyattnError
from polyattn._errors import RopeConfigError as RopeConfigError
from polyattn._errors import UnknownBackendError as UnknownBackendError
from polyattn._errors import UnknownRopeVariantError as UnknownRopeVariantError
from polyattn._errors import UnsupportedAttentionError as UnsupportedAttentionError
from polyattn._functional import attention as attention
from polyattn._layout import MaskLayout as MaskLayout
from polyattn._layout import StructuredMask as StructuredMask
from polyattn._lse import merge as merge
from polyattn._reasons import FEATURES as FEATURES
from polyattn._reasons import Reason as Reason
from polyattn._request import AttentionRequest as AttentionRequest
from polyattn._scope import AttentionScope as AttentionScope
from polyattn.kernels import apply_sinks as apply_sinks
from polyattn.registry import Registry as Registry
from polyattn.registry import backends as backends
from polyattn.registry import rope_variants as rope_variants
from polyattn.rope import RopeFrequencies as RopeFrequencies
from polyattn.rope import RopeSpec as RopeSpec
from polyattn.rope import RopeVariant as RopeVariant
from polyattn.rope import RotaryEmbedding as RotaryEmbedding
from polyattn.rope import RotaryTables as RotaryTables
from polyattn.rope import apply_rotary as apply_rotary
from polyattn.select import Decision as Decision
from polyattn.select import explain as explain
from polyattn_modules import AttentionConfig as AttentionConfig
from polyattn_modules import AttentionSpec as AttentionSpec
from polyattn_modules import GroupedQueryAttention as GroupedQueryAttention
from polyattn_modules import KVCache as KVCache
from polyattn_modules import LatentAttention as LatentAttention
from polyattn_modules import LatentSpec as LatentSpec
from polyattn_modules import PackedTree as PackedTree
from polyattn_modules import QKNorm as QKNorm
from polyattn_modules import check_servable as check_servable
from polyattn_modules import pack_tree as pack_tree
from polyattn_modules import read_yaml as read_yaml

_MODULES: dict[str, tuple[str, ...]]
__version__: str

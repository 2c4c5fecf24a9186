"""Describes draft architectures: plain DFlash, the additions of others, and the one table of them.

An architecture is a folder next to this one; its `architecture.py` derives from `DraftArchitecture`, and `BUILT_IN`
lists it. The backbone, checkpoints, training, the engine and dflash-doctor find it by its kind or by the sizes in a
configuration. Without torch: command lines are read before it is imported.
"""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..drafting import BetweenWeights, Empty, SelectorWeights, TokenSelector
    from ..spec import ConvolutionSpec
    from .config import DrafterConfig
    from .network import Drafter

BUILT_IN = ("dflash2", "dspine")  # folders next to this one; each has an ARCHITECTURE in `architecture.py`
DRAFT_CANDIDATES = 16  # best tokens of a slot that its draft is sampled from, where no selector has a number of its own


@dataclass(frozen=True, slots=True)
class Size:
    """A field of the configuration, in the architecture's group on disk and an option of training."""

    default: int  # if its part is used
    help: str
    stored: str = ""  # its name on disk, if that is another one
    up_to_width: bool = False  # the default is at most the hidden size


@dataclass(frozen=True, slots=True)
class Idle:
    """A tensor of a part that is zero before training, and dflash-doctor's words for one that still is."""

    name: str  # the tensor's, or a common piece of several names
    words: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Two tensors of one shape that may have been exchanged: an edit for dflash-doctor to try."""

    check: str
    what: str
    tensors: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An addition to the backbone, which a drafter of its kind may leave out: all its sizes are then 0."""

    name: str
    sizes: Mapping[str, Size]
    selects: bool = False  # it is the selector
    needed_by: tuple[str, ...] = ()  # other engines that cannot run such a drafter without it
    idle: tuple[Idle, ...] = ()
    swaps: tuple[Swap, ...] = ()

    def is_in(self, sizes: Mapping[str, Any]) -> bool:
        return any(sizes.get(name) for name in self.sizes)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftArchitecture:
    """The backbone alone; subclasses override their additions. Sizes are as in the configuration, by name."""

    kind: str  # drafter.kind
    title: str
    names: tuple[str, ...]  # in a config.json: the written one first, then further ones that are read
    parts: tuple[Part, ...] = ()
    selector_name: str = "candidate_selector"  # the module's, and so the prefix of its tensors
    releases: Mapping[str, str] = field(default_factory=dict)  # by engine, the first release that drafts with it
    scaled_by: tuple[str, ...] = ()  # engines that read the input_embedding_scale of such a drafter
    between_name: str = ""  # the module between the layers, and so the prefix of its tensors
    stored_in: str = "dflash_config"  # the group of config.json with its sizes
    causal: bool = False  # a slot sees only the slots before it, whatever the configuration says
    loss: Mapping[str, Any] = field(default_factory=dict)  # options of the loss in training, if none of them is given

    @property
    def sizes(self) -> dict[str, Size]:
        """The sizes of all parts."""
        return {name: size for part in self.parts for name, size in part.sizes.items()}

    def has_selector(self, sizes: Mapping[str, Any]) -> bool:
        return any(part.selects and part.is_in(sizes) for part in self.parts)

    def part_lacking(self, engine: str, sizes: Mapping[str, Any]) -> str | None:
        """Returns the part without which an engine cannot run the drafter."""
        return next((p.name for p in self.parts if engine in p.needed_by and not p.is_in(sizes)), None)

    def sizes_of(self, given: Mapping[str, int | None], width: int | None = None) -> dict[str, Any]:
        """Returns the sizes of all its parts; 0 for a part that is left out.

        Args:
            given: None is the default; if one size of a part is given as 0, and no other, all its sizes are 0.
            width: the hidden size, which limits some defaults.

        Raises:
            ValueError: a size of another kind's part, or all parts are left out.
        """
        if named := next((name for name, size in given.items() if size and name not in self.sizes), None):
            owner = next((each.kind for each in architectures() if named in each.sizes), None)
            kind_of = f"a part of kind {owner}" if owner else "of no kind"
            raise ValueError(f"{named} is {given[named]}, which is {kind_of}; kind is {self.kind}")
        found = dict.fromkeys(self.sizes, 0)
        for part in self.parts:
            asked = {name: given.get(name) for name in part.sizes}
            if 0 not in asked.values() or any(asked.values()):
                default = {
                    name: min(size.default, width) if width and size.up_to_width else size.default
                    for name, size in part.sizes.items()
                }
                found |= default | {name: size for name, size in asked.items() if size is not None}
        if self.parts and not any(found.values()):
            left_out = " and ".join(next(iter(part.sizes)) for part in self.parts)
            are = "are" if len(self.parts) > 1 else "is"
            raise ValueError(f"{left_out} {are} 0: kind {self.kind} without its parts is kind dflash")
        return found

    # ---- the network ---------------------------------------------------------------------------------------------

    def config(self) -> "type[DrafterConfig]":
        """The class of its configurations. A kind with sizes that `DrafterConfig` lacks adds fields to it, with default
        0."""
        from .config import DrafterConfig

        return DrafterConfig

    def check(self, config: "DrafterConfig") -> None:
        """Raises ValueError for sizes that cannot work; their completeness has been checked."""

    def around(self, config: "DrafterConfig") -> "nn.Module | None":
        """Returns a module around every sublayer of the network, like `DynamicConvolution`."""
        return None

    def around_spec(self, config: "DrafterConfig") -> "ConvolutionSpec | None":
        """Returns the same for the engine, which computes convolutions."""
        return None

    def between(self, config: "DrafterConfig") -> "nn.Module | None":
        """Returns a module that changes the rows of blocks after every layer, a `Between`."""
        return None

    def between_weights(self, config: "DrafterConfig", empty: "Empty") -> "BetweenWeights | None":
        """Returns its empty weights in the engine."""
        return None

    def fixed_tensors(self, config: "DrafterConfig") -> "Mapping[str, Tensor]":
        """Returns tensors of the drafter that are not trained, by name: their shapes and types."""
        return {}

    def fit_head(self, drafter: "Drafter", head: "Tensor") -> None:
        """Initialises the parts that depend on the target's head [V, D], unless that is done; called before training.

        Raises ValueError for a head that does not suffice.
        """

    def unusable(self, drafter: "Drafter") -> str:
        """Returns why a drafter cannot be used, if parts of it were never initialised."""
        return ""

    def selector(self, config: "DrafterConfig") -> "nn.Module | None":
        """Returns the module that chooses tokens, a `TokenSelector`; None: each slot takes its best."""
        return None

    def chooser(self, drafter: "Drafter", head: "Tensor | None") -> "TokenSelector | None":
        """Returns what chooses a drafter's tokens; by default its selector.

        Args:
            head: [V, D], the target's; None if only its signature is needed.
        """
        return drafter.selector

    def selector_weights(self, config: "DrafterConfig", empty: "Empty") -> "SelectorWeights | None":
        """Returns the selector's empty weights in the engine."""
        return None

    def candidates(self, config: "DrafterConfig") -> int:
        """Returns the number of best tokens of a slot to choose its draft from."""
        return min(DRAFT_CANDIDATES, config.vocab_size)

    def layer_products(self, config: "DrafterConfig") -> int:
        """Returns the multiply-adds of all parts for a row of a block in a layer."""
        return 0

    def selector_products(self, config: "DrafterConfig") -> int:
        """Returns the multiply-adds of the selector for a slot."""
        return 0

    def choice_bytes(self, config: "DrafterConfig", slots: int, size: int) -> int:
        """Returns the temporary bytes of choosing the tokens of `slots` in the engine, beyond the logits.

        Args:
            size: bytes of a value.
        """
        return 0

    # ---- dflash-doctor -------------------------------------------------------------------------------------------

    def is_initial(self, name: str, tensor: "Tensor") -> bool | None:
        """Whether a tensor of a part is as before training; None: a backbone tensor, or initialised like one."""
        idle = any(each.name in name for part in self.parts for each in part.idle)
        return not tensor.any() if idle else None


# ---- the table -----------------------------------------------------------------------------------------------------

DFLASH = DraftArchitecture(
    kind="dflash",
    title="DFlash",
    # written by z-lab and this project, NeMo Automodel, the speculators library
    names=("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator"),
    releases={"vllm": "0.20.0", "sglang": "0.5.11"},
)


@functools.cache
def _loaded(folders: tuple[str, ...]) -> tuple[DraftArchitecture, ...]:
    # by name, as they import modules of this folder
    found = (importlib.import_module(f"..{folder}.architecture", __package__) for folder in folders)
    return DFLASH, *(module.ARCHITECTURE for module in found)


def architectures() -> tuple[DraftArchitecture, ...]:
    """Returns all known architectures, plain DFlash first."""
    return _loaded(BUILT_IN)


def kinds() -> tuple[str, ...]:
    return tuple(each.kind for each in architectures())


def of_kind(kind: str) -> DraftArchitecture:
    """Returns the architecture of a kind. Raises ValueError for an unknown one."""
    if found := next((each for each in architectures() if each.kind == kind), None):
        return found
    raise ValueError(f"kind {kind!r} is not one of {', '.join(kinds())}")


def named(name: str) -> DraftArchitecture | None:
    """Returns the architecture with this name in a config.json; None for an unknown one."""
    return next((each for each in architectures() if name in each.names), None)


def all_sizes() -> dict[str, Size]:
    """Returns the sizes of all parts of all architectures."""
    return {name: size for each in architectures() for name, size in each.sizes.items()}


def asked_by(sizes: Mapping[str, int | None]) -> DraftArchitecture | None:
    """Returns the first with parts for all given sizes, even if they are 0; None if there is none or none is given."""
    given = {name for name, size in sizes.items() if size is not None}
    return next((each for each in architectures() if given <= each.sizes.keys()), None) if given else None


def of_sizes(sizes: Mapping[str, Any]) -> DraftArchitecture:
    """Returns the first with all sizes above 0, plain DFlash without any. Raises ValueError if there is none."""
    there = [name for name in all_sizes() if sizes.get(name)]
    if not there:
        return DFLASH
    if found := next((each for each in architectures() if set(there) <= each.sizes.keys()), None):
        return found
    raise ValueError(f"no kind of drafter has all of {', '.join(there)}")


def of_config(config: "DrafterConfig") -> DraftArchitecture:
    """Returns the architecture of a drafter."""
    return of_sizes({name: getattr(config, name, 0) for name in all_sizes()})

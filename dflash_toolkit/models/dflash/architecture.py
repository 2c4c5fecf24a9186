"""What tells one draft architecture from another: plain DFlash, what others add to it, and the one table of them.

An architecture is a folder beside this one, whose `architecture.py` derives from `DraftArchitecture`; `BUILT_IN` lists
it. The backbone, checkpoints, training, the engine and dflash-doctor ask it for what it adds, by its kind or by the
sizes in a configuration. Without torch: commands are made of it before that is imported.
"""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..drafting import Empty, SelectorWeights
    from ..spec import ConvolutionSpec
    from .network import DrafterConfig

BUILT_IN = ("dflash2",)  # folders next to this one; each has an ARCHITECTURE in `architecture.py`
DRAFT_CANDIDATES = 16  # best tokens of a slot that its draft is sampled from, where no selector has a number of its own


@dataclass(frozen=True, slots=True)
class Size:
    """A field of the configuration, in `dflash_config` on disk and an option of training."""

    default: int  # where its part is there
    help: str


@dataclass(frozen=True, slots=True)
class Idle:
    """A tensor of a part that is zero before training: what dflash-doctor says of one that still is."""

    name: str  # of the tensor, or a piece of all their names
    words: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Two tensors of one shape that may have taken each other's names: what dflash-doctor tries."""

    check: str
    what: str
    tensors: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an architecture adds to the backbone, and a drafter of its kind may leave out: all its sizes are then 0."""

    name: str
    sizes: Mapping[str, Size]
    selects: bool = False  # it is the selector
    needed_by: tuple[str, ...] = ()  # other engines that compute no such drafter without it
    idle: tuple[Idle, ...] = ()
    swaps: tuple[Swap, ...] = ()

    def is_in(self, sizes: Mapping[str, Any]) -> bool:
        return any(sizes.get(name) for name in self.sizes)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftArchitecture:
    """The backbone alone; another says otherwise what it adds. Sizes are as in the configuration, by name."""

    kind: str  # drafter.kind
    title: str
    names: tuple[str, ...]  # in a config.json: the one that is written, and those that are read too
    parts: tuple[Part, ...] = ()
    selector_name: str = "candidate_selector"  # of the module, and so of its tensors
    releases: Mapping[str, str] = field(default_factory=dict)  # of other engines, the first that drafts with one
    scaled_by: tuple[str, ...] = ()  # engines that read the input_embedding_scale of such a drafter

    @property
    def sizes(self) -> dict[str, Size]:
        """Of all parts."""
        return {name: size for part in self.parts for name, size in part.sizes.items()}

    def has_selector(self, sizes: Mapping[str, Any]) -> bool:
        return any(part.selects and part.is_in(sizes) for part in self.parts)

    def part_lacking(self, engine: str, sizes: Mapping[str, Any]) -> str | None:
        """Which part of a drafter an engine would miss."""
        return next((p.name for p in self.parts if engine in p.needed_by and not p.is_in(sizes)), None)

    def sizes_of(self, given: Mapping[str, int | None]) -> dict[str, Any]:
        """The sizes of all its parts; of one that is not there 0.

        Args:
            given: None is the default; of a part one of whose sizes is given as 0, and none otherwise, all are 0.

        Raises:
            ValueError: a size of another kind's part, or all parts are left out.
        """
        if named := next((name for name, size in given.items() if size and name not in self.sizes), None):
            owner = next((each.kind for each in architectures() if named in each.sizes), None)
            whose = f"a part of kind {owner}" if owner else "of no kind"
            raise ValueError(f"{named} is {given[named]}, which is {whose}; kind is {self.kind}")
        found = dict.fromkeys(self.sizes, 0)
        for part in self.parts:
            asked = {name: given.get(name) for name in part.sizes}
            if 0 not in asked.values() or any(asked.values()):
                default = {name: size.default for name, size in part.sizes.items()}
                found |= default | {name: size for name, size in asked.items() if size is not None}
        if self.parts and not any(found.values()):
            left_out = " and ".join(next(iter(part.sizes)) for part in self.parts)
            are = "are" if len(self.parts) > 1 else "is"
            raise ValueError(f"{left_out} {are} 0: kind {self.kind} without its parts is kind dflash")
        return found

    # ---- the network ---------------------------------------------------------------------------------------------

    def config(self) -> "type[DrafterConfig]":
        """The class of its configurations. One with sizes that `DrafterConfig` has not adds fields to it, 0 unless
        given."""
        from .network import DrafterConfig

        return DrafterConfig

    def check(self, config: "DrafterConfig") -> None:
        """Raises ValueError for sizes that cannot work; that they are there together has been checked."""

    def around(self, config: "DrafterConfig") -> "nn.Module | None":
        """What stands around every sublayer of the network: a module like `DynamicConvolution`."""
        return None

    def around_spec(self, config: "DrafterConfig") -> "ConvolutionSpec | None":
        """The same for the engine, which computes convolutions."""
        return None

    def selector(self, config: "DrafterConfig") -> "nn.Module | None":
        """The module that chooses tokens, a `TokenSelector`; None: each slot takes its best."""
        return None

    def selector_weights(self, config: "DrafterConfig", empty: "Empty") -> "SelectorWeights | None":
        """The selector's empty weights in the engine."""
        return None

    def candidates(self, config: "DrafterConfig") -> int:
        """Best tokens of a slot that its draft is chosen from."""
        return min(DRAFT_CANDIDATES, config.vocab_size)

    def layer_products(self, config: "DrafterConfig") -> int:
        """Multiply-adds of all parts for a row of a block in a layer."""
        return 0

    def selector_products(self, config: "DrafterConfig") -> int:
        """Multiply-adds of the selector for a slot."""
        return 0

    # ---- dflash-doctor -------------------------------------------------------------------------------------------

    def is_initial(self, name: str, tensor: "Tensor") -> bool | None:
        """Whether a tensor of a part is as before training; None: it is the backbone's, or drawn as its matrices."""
        idle = any(each.name in name for part in self.parts for each in part.idle)
        return not tensor.any() if idle else None


# ---- the table -----------------------------------------------------------------------------------------------------

DFLASH = DraftArchitecture(
    kind="dflash",
    title="DFlash",
    # by whom they are written: z-lab and this project, NeMo Automodel, the speculators library
    names=("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator"),
    releases={"vllm": "0.20.0", "sglang": "0.5.11"},
)


@functools.cache
def _loaded(folders: tuple[str, ...]) -> tuple[DraftArchitecture, ...]:
    # by name, as they import what this folder has
    found = (importlib.import_module(f"..{folder}.architecture", __package__) for folder in folders)
    return DFLASH, *(module.ARCHITECTURE for module in found)


def architectures() -> tuple[DraftArchitecture, ...]:
    """All that are known, plain DFlash first."""
    return _loaded(BUILT_IN)


def kinds() -> tuple[str, ...]:
    return tuple(each.kind for each in architectures())


def of_kind(kind: str) -> DraftArchitecture:
    """Raises ValueError: it is not known."""
    if found := next((each for each in architectures() if each.kind == kind), None):
        return found
    raise ValueError(f"kind {kind!r} is not one of {', '.join(kinds())}")


def named(name: str) -> DraftArchitecture | None:
    """By its name in a config.json; None: it is not known."""
    return next((each for each in architectures() if name in each.names), None)


def all_sizes() -> dict[str, Size]:
    """Of all parts of all architectures."""
    return {name: size for each in architectures() for name, size in each.sizes.items()}


def asked_by(sizes: Mapping[str, int | None]) -> DraftArchitecture | None:
    """The first with the parts whose sizes are given, be they 0; None: none is given, or none has them all."""
    given = {name for name, size in sizes.items() if size is not None}
    return next((each for each in architectures() if given <= each.sizes.keys()), None) if given else None


def of_sizes(sizes: Mapping[str, Any]) -> DraftArchitecture:
    """The first with all the sizes that are there, plain DFlash where none is. Raises ValueError: there is none."""
    there = [name for name in all_sizes() if sizes.get(name)]
    if not there:
        return DFLASH
    if found := next((each for each in architectures() if set(there) <= each.sizes.keys()), None):
        return found
    raise ValueError(f"no kind of drafter has all of {', '.join(there)}")


def of_config(config: "DrafterConfig") -> DraftArchitecture:
    """The one whose parts a drafter has."""
    return of_sizes({name: getattr(config, name, 0) for name in all_sizes()})

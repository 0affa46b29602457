"""Measured files in the default folders of the profilers, used where no input is named.

Without `--out`, `torchrun -m profiler.hardware` and `profile-model` write into folders below the
current one (`autopar.documents.catalog`). A search in the same folder uses these files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autopar.documents.catalog import (
    ALLREDUCE_FILES,
    HARDWARE_FOLDER,
    find_card,
    find_model,
    hardware_folders,
    hardware_names,
    is_shipped_folder,
    model_file_name,
    model_folder,
    model_folders,
    site_files,
)
from autopar.errors import InputError, OptionError
from autopar.records import Record
from autopar.run.model import ModelSpec

if TYPE_CHECKING:
    from autopar.rates.card import Card
    from autopar.rates.site import Site

_CARD = re.compile(r".+:[^/\\]*")
"""Text in the form CARD:NODESxGPUS, well formed or not."""
_PRECISIONS = ("bf16", "fp16", "fp32")
_MEASURE_HARDWARE = "torchrun -m profiler.hardware"


class DiscoveredProfiles(Record):
    """Default folders used for inputs that the user did not name; None if nothing was found."""

    hardware: str | None = None
    times: str | None = None
    memory: str | None = None
    """Folder of the memory file; set together with `times`."""
    unused: tuple[str, ...] = ()
    """Sentences on files in default folders that are not used, with the reason."""

    @property
    def named(self) -> dict[str, str]:
        """Option name -> default folder, for options that a default folder replaces."""
        found = {
            "hardware": self.hardware,
            "time-profiling-path": self.times,
            "memory-profiling-path": self.memory,
        }
        return {option: folder for option, folder in found.items() if folder is not None}

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for stderr on default folders that are used and on files that are not used."""
        lines = []
        if self.hardware is not None:
            lines.append(
                f"--hardware not given; using the hardware of {self.hardware}. "
                "Use --hardware CARD:NODESxGPUS to estimate"
            )
        if self.times is not None:
            lines.append(
                f"--time-profiling-path not given; using {self._profile}. Use "
                "--hardware CARD:NODESxGPUS to estimate"
            )
        return (*lines, *self.unused)

    @property
    def defaults(self) -> tuple[str, ...]:
        """Default folders as lines of options that were not given."""
        lines = []
        if self.hardware is not None:
            lines.append(f"--hardware {self.hardware} (hardware of {self.hardware})")
        if self.times is not None:
            lines.append(
                f"--time-profiling-path {self.times} --memory-profiling-path {self.memory} "
                f"({self._profile})"
            )
        return tuple(lines)

    @property
    def _profile(self) -> str:
        if self.times == self.memory:
            return f"times and memory of {self.times}"
        return f"times of {self.times} and memory of {self.memory}"


def find_places(
    spec: Callable[[], ModelSpec],
    precision: str,
    *,
    card: str | None,
    has_hardware: bool,
    has_profile: bool,
    has_shape: bool,
) -> DiscoveredProfiles:
    """Return the default folders that are used for inputs that the user did not name.

    Measured files are used for both model and cluster, or for neither: a measured model on an
    estimated device is planned only where the user names both.

    spec : returns the model; called only where its files matter.
    card : hardware as CARD:NODESxGPUS if it is named, which requests estimates.
    has_hardware : True if a card, a folder or a file of hardware is named.
    has_profile : True if times or memory of the model are named.
    has_shape : True if a number of nodes or GPUs is named, which selects a measured cluster.

    Raises OptionError: the folders contain files of several devices or of another device than that
    of the cluster, or a file that measured times require is missing.
    """
    hardware = () if has_hardware else hardware_folders()
    if has_profile:
        return DiscoveredProfiles(hardware=_only("--hardware", "files of a cluster", hardware))
    if not hardware and not Path("models").is_dir():
        return DiscoveredProfiles()
    model = spec()
    times, other_times = _own(model, "computation", precision)
    memory, other_memory = _own(model, "memory", precision)
    if card is not None:
        return DiscoveredProfiles(unused=tuple(_beside_a_card(model, card, times)))
    if times:
        if not memory:
            raise OptionError(
                f"{times[0]} has times of {model.name}, but "
                f"{model_folder(model.name)} has no memory",
                remedy=(
                    "Add --memory-profiling-path; profile-model --profile-type memory counts it"
                ),
            )
        if not has_hardware and not hardware:
            raise OptionError(
                f"--hardware is missing: {times[0]} has measured times of "
                f"{model.name}, but {HARDWARE_FOLDER} no cluster",
                remedy=(
                    "Add --hardware CARD:NODESxGPUS such as a100-80gb:1x8, or run "
                    f"{_MEASURE_HARDWARE}"
                ),
            )
        if len(hardware) == 1:
            times = _of_the_device(times, model, precision, hardware[0])
        return DiscoveredProfiles(
            hardware=_only("--hardware", "files of a cluster", hardware),
            times=_only("--time-profiling-path", f"times of {model.name}", times),
            memory=_only("--memory-profiling-path", f"memory of {model.name}", memory),
        )
    others = dict.fromkeys((*other_times, *other_memory))
    unused = [
        (f"profile of {folder} not used: {model.name} was measured with other sizes")
        for folder in others
        if not is_shipped_folder(folder)
    ]
    unused += [*_other_precisions(model, precision), *_lonely_memory(model, memory)]
    if hardware and has_shape:
        # the user selects a shape of this cluster: loading reports that the model is missing
        return DiscoveredProfiles(
            hardware=_only("--hardware", "files of a cluster", hardware), unused=tuple(unused)
        )
    if hardware:
        unused.append(
            f"hardware of {hardware[0]} not used: {model_folder(model.name)} has "
            f"no times of {model.name} in {precision}, which profile-model "
            "writes"
        )
    return DiscoveredProfiles(unused=tuple(unused))


def _own(
    model: ModelSpec, kind: Literal["computation", "memory"], precision: str
) -> tuple[list[Path], list[Path]]:
    """Return (folders with a profile of the model, folders with one of a model of other sizes).

    File names contain only hidden size and heads, so the sizes are compared by sidecar; files
    without a sidecar are accepted.
    """
    from autopar.documents.sidecar import describe_model, read_sidecar  # slow import

    found: tuple[list[Path], list[Path]] = ([], [])
    for folder in model_folders(kind, precision, model):
        said = {
            run.metadata.get("model")
            for path in folder.glob(model_file_name(kind, precision, model))
            if (sidecar := read_sidecar(path)) is not None
            for run in sidecar.runs
        } - {None}
        # compare digests only, so that the name of a model is ignored
        digest = describe_model(model).rpartition(" ")[2]
        known = all(layer.ffn_hidden_size is not None for layer in model.layers)
        other = (
            known and bool(said) and digest not in {str(text).rpartition(" ")[2] for text in said}
        )
        found[other].append(folder)
    return found


def _of_the_device(
    times: Sequence[Path], model: ModelSpec, precision: str, hardware: Path
) -> list[Path]:
    """Return the folders of times that were measured on the device of the cluster.

    Files without a device name are accepted. Raises OptionError if all name another device.
    """
    here = _devices(hardware, ALLREDUCE_FILES)
    file = model_file_name("computation", precision, model)
    there = {folder: _devices(folder, file) for folder in times}
    left = [folder for folder, devices in there.items() if not (devices and here) or devices & here]
    if not left:
        folder, devices = next(iter(there.items()))
        raise OptionError(
            f"--hardware is missing: times of {folder} were measured on "
            f"{min(devices)}, but {hardware} on {min(here)}",
            remedy="Give both folders to plan with them",
        )
    return left


def _devices(folder: Path, pattern: str) -> set[str]:
    """Return the device names in the sidecars of files that match a pattern; empty for none."""
    from autopar.documents.sidecar import read_sidecar

    found = [read_sidecar(path) for path in sorted(folder.glob(pattern))]
    runs = [run for sidecar in found if sidecar is not None for run in sidecar.runs]
    return {str(run.metadata["device"]) for run in runs if run.metadata.get("device")}


def _only(option: str, what: str, folders: Sequence[Path]) -> str | None:
    """Return the only folder, or None if there is none; raise OptionError for several."""
    if len(folders) > 1:
        listed = " and ".join(str(folder) for folder in folders)
        raise OptionError(f"{option} is missing: {what} are in {listed}", remedy="Add one of them")
    return str(folders[0]) if folders else None


def _beside_a_card(model: ModelSpec, card: str, times: Sequence[Path]) -> list[str]:
    """Return at most one sentence on measured times that are unused because a card is named."""
    return [
        (
            f"times of {folder} not used: --hardware {card} estimates {model.name}. "
            "Use them with --time-profiling-path and --memory-profiling-path"
        )
        for folder in times[:1]
    ]


def _other_precisions(model: ModelSpec, precision: str) -> list[str]:
    """Return at most one sentence on times that exist only in another precision."""
    found = [
        (other, folder)
        for other in _PRECISIONS
        if other != precision
        for folder in model_folders("computation", other, model)
    ]
    return [
        f"times of {folder} are not used: they are in {other}, and --mixed-precision is {precision}"
        for other, folder in found[:1]
    ]


def _lonely_memory(model: ModelSpec, memory: Sequence[Path]) -> list[str]:
    """Return at most one sentence on user-measured memory without measured times."""
    own = [folder for folder in memory if not is_shipped_folder(folder)]
    return [
        (
            f"memory of {folder} not used: it has no times of {model.name}. Measure "
            "them with profile-model --profile-type computation"
        )
        for folder in own[:1]
    ]


def find_site_of(
    card: str, num_nodes: int, gpus_per_node: int
) -> tuple[Path | None, tuple[str, ...]]:
    """Return the site file of a cluster in the default folder, and messages on site files.

    A file matches if it was measured with this card and the same number of nodes and GPUs per node.
    For other cluster sizes of this card there is only a message. Raises OptionError if several
    files match.
    """
    from autopar.rates.card import load_card
    from autopar.rates.site import load_site

    wanted = load_card(card)
    found, says = [], []
    for path in site_files():
        try:
            site = load_site(str(path))
        except InputError as error:
            says.append(f"{path} not used: {error}")
            continue
        # ignore sites of other cards and sites without a card
        if site.card is None or not _is_of(site, wanted):
            continue
        measured = (site.num_nodes, site.gpus_per_node)
        why = "it is synthetic" if not site.known else ""
        if measured != (num_nodes, gpus_per_node):
            why = f"it was measured on {site.num_nodes} x {site.gpus_per_node} GPUs"
        if why:
            says.append(f"{path} not used: {why}. Use --site {path} to use all of it")
        else:
            found.append(path)
    if len(found) > 1:
        listed = " and ".join(map(str, found))
        raise OptionError(
            f"--site is missing: {listed} match {num_nodes} x {gpus_per_node} {wanted.name}",
            remedy="Add one of them, or --site none",
        )
    if not found:
        return None, tuple(says)
    line = (
        f"--site not given; using {found[0]}, measured on this cluster. Use "
        "--site none to ignore it"
    )
    return found[0], (line, *says)


def _is_of(site: Site, card: Card) -> bool:
    try:
        site.require_card(card)
    except InputError:
        return False
    return True


def named_card(hardware: str | None) -> str | None:
    """Return the hardware if it has the form CARD:NODESxGPUS and is no folder, else None."""
    is_card = hardware is not None and _CARD.fullmatch(hardware) and not Path(hardware).is_dir()
    return hardware if is_card else None


def card_shape(
    hardware: str, num_nodes: int | None, gpus_per_node: int | None, world_size: int | None
) -> tuple[str, int, int]:
    """Return (card, nodes, GPUs per node) of hardware in the form CARD:NODESxGPUS.

    Raises OptionError if one of the given numbers contradicts it.
    """
    from autopar.rates.card import parse_hardware

    card, nodes, gpus = parse_hardware(hardware)
    for name, given, implied in (
        ("--nodes", num_nodes, nodes),
        ("--gpus-per-node", gpus_per_node, gpus),
        ("--gpus", world_size, nodes * gpus),
    ):
        if given is not None and given != implied:
            raise OptionError(f"{name}: {given} contradicts --hardware {hardware} ({implied})")
    return card, nodes, gpus


def is_bare_card(hardware: str) -> bool:
    """Return True if hardware is a card name without a shape and no measured cluster."""
    if named_card(hardware) or Path(hardware).exists() or hardware in hardware_names():
        return False
    try:
        find_card(hardware)
    except InputError:
        return False
    return True


def card_with_shape(
    card: str, num_nodes: int | None, gpus_per_node: int | None, world_size: int | None
) -> str:
    """Return `CARD:NODESxGPUS` of a card and the numbers of nodes and GPUs given with it.

    Without `gpus_per_node` a node has as many GPUs as the card allows. Raises OptionError if the
    numbers do not define a shape.
    """
    from autopar.rates.card import load_card

    most = load_card(card).max_gpus_per_node
    per_node = gpus_per_node or min(most, world_size or most)
    if num_nodes is None and gpus_per_node is None and world_size is None:
        raise OptionError(
            f"--hardware {card}: the size of the cluster is missing",
            remedy=f"Use {card}:8x{most} (8 nodes of {most} GPUs), or add --gpus 64",
        )
    if world_size is None:
        return f"{card}:{num_nodes or 1}x{per_node}"
    if num_nodes is not None and gpus_per_node is None:
        per_node = world_size // num_nodes
    nodes = num_nodes or world_size // max(per_node, 1)
    if nodes * per_node != world_size:
        raise OptionError(
            f"--gpus {world_size}: {nodes} nodes of {per_node} are {nodes * per_node} GPUs",
            remedy=f"Use --hardware {card}:NxG, or other --nodes and --gpus-per-node",
        )
    return f"{card}:{nodes}x{per_node}"


def is_measured_only(name: str) -> bool:
    """Return True if a model name has a folder of measured files but no description."""
    try:
        find_model(name)
    except InputError:
        return model_folder(name).is_dir()
    return False


def cluster_shape(
    nodes: int | None,
    gpus: int | None,
    world: int | None,
    shapes: Sequence[tuple[int, int]] = (),
) -> tuple[int, int]:
    """Return (nodes, GPUs per node): the only matching shape, else derived from the given sizes.

    Defaults are 1 node and 8 GPUs per node. Raises OptionError if the sizes contradict each other.

    nodes, gpus, world : nodes, GPUs per node and total GPUs of the user; None is not given
    shapes : (nodes, GPUs per node) of the available hardware files
    """
    left = [
        shape
        for shape in shapes
        if nodes in (None, shape[0]) and gpus in (None, shape[1])
        if world in (None, shape[0] * shape[1])
    ]
    if len(left) == 1:
        return left[0]
    if world is None:
        return nodes or 1, gpus or 8
    if gpus is None:
        gpus = world // nodes if nodes is not None else min(world, 8)
    if nodes is None:
        nodes = world // gpus if gpus else 0
    if nodes * gpus != world:
        raise OptionError(
            f"--gpus {world}: --nodes({nodes}) * --gpus-per-node({gpus}) = "
            f"{nodes * gpus} != {world}"
        )
    return nodes, gpus

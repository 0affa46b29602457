"""An independent implementation of the step time of a dense model: numbers, loops, no arrays.

Without it `autopar.rates.layer` and `autopar.price.step` would be compared with themselves. It is
written from the formulas of docs/concepts/estimates.md and reads the constants of cards and stacks
from their JSON files. It shares only the seconds of a collective with the product, which
`tests.oracles.collectives` implements again. Mixtures of experts, latent attention, windows and
mixers are not supported.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from autopar.rates.collectives import GroupShape, Network, SiteFactors
from autopar.run.architecture import Mlp
from autopar.run.job import Block, Job
from tests.oracles.collectives import seconds

DATA = Path(__file__).resolve().parents[2] / "hardware_configs"
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_block": 1, "mxfp8": 1, "nvfp4": 0.5}
TIMES_BF16 = {"fp8": 2, "fp8_block": 2, "mxfp8": 2, "nvfp4": 4}
SAME = {"fp16": "bf16", "mxfp8": "fp8_block"}
TILES = "256x256 256x128 128x256 128x128 256x64 64x256 128x64 64x128 64x64 64x32 32x64"


class Site(NamedTuple):
    """A machine: names of documents, the card's network, and measured figures of the cluster."""

    card: str
    stack: str
    network: Network
    clock: float
    clock_measured: bool
    """True if the clock is that of the cluster's own 16-bit products."""
    memory_share: float | None
    """Achieved memory bandwidth share of elementwise kernels; None: the card's."""
    factors: SiteFactors


@cache
def _read(folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / folder / f"{name}.json").read_text("utf-8"))
    return found


class _Device:
    """The figures of a card."""

    def __init__(self, site: Site) -> None:
        self.card = _read("cards", site.card)
        self.kernels = self.card["kernels"]
        self.clock, self.clock_measured = site.clock, site.clock_measured
        shares = {key: entry["value"]["share"] for key, entry in self.kernels["memory"].items()}
        self.shares = shares
        self.hbm = self.card["device"]["memory_bytes_per_s"]["value"]
        if site.memory_share is not None:
            self.hbm *= site.memory_share / shares["elementwise"]
        self.sms = self.card["device"]["num_sms"]["value"]
        self.launch = self.kernels["memory_launch"]["value"]["launch_s"]

    def peak(self, dtype: str) -> float:
        device = self.card["device"]
        if dtype in TIMES_BF16:
            return float(device["bf16_flop_per_s"]["value"] * TIMES_BF16[dtype])
        return float(device[f"{dtype}_flop_per_s"]["value"])

    def moving(self, moved: float, kind: str = "elementwise", launches: int = 1) -> float:
        """Return the seconds of kernels that move bytes, and of their launches."""
        share = self.shares.get(kind, self.shares["elementwise"])
        return moved / (share * self.hbm) + launches * self.launch

    def product(self, m: float, n: float, k: float, dtype: str, batch: float = 1) -> float:
        """Return the seconds of GEMMs of one shape in a run, without effects of alignment."""
        surfaces = self.kernels["gemm"]
        value = surfaces[dtype if dtype in surfaces else SAME[dtype]]["value"]
        clock = self.clock
        if WIDTHS[dtype] < 2 and "low_precision_clock" in self.kernels:
            clock *= self.kernels["low_precision_clock"]["value"]["share"]
            if self.clock_measured and "product_clock" in self.kernels:
                clock /= self.kernels["product_clock"]["value"]["share"]
        if WIDTHS[dtype] == 2 and "product_clock" in self.kernels and not self.clock_measured:
            clock *= self.kernels["product_clock"]["value"]["share"]
        best = math.inf
        for tile in TILES.split():
            tm, tn = (int(side) for side in tile.split("x"))
            intensity = tm * tn / (tm + tn) / (256 * 128 / (256 + 128))
            speed = self.peak(dtype) * value["peak_share"] * clock / self.sms
            speed *= min(1.0, intensity) ** value["tile_exponent"]
            for parts in (1, 2, 4, 8):
                if parts > 1 and batch > 1:
                    continue
                blocks = batch * math.ceil(m / tm) * math.ceil(n / tn) * parts
                waves = blocks / self.sms
                rounding = value["wave_rounding"]
                waves = max(1.0, rounding * math.ceil(waves) + (1 - rounding) * waves)
                time = waves * 2 * tm * tn * (k / parts + value["prologue_elements"]) / speed
                if parts > 1:
                    time += value.get("split_s", 2e-6) + 4 * m * n * (parts + 1) / (0.8 * self.hbm)
                best = min(best, time)
        # the clock of a run is reduced already, and falls less in long kernels
        fall = value.get("slowdown", 0.0) * 0.4
        best *= 1 + fall * math.log(1 + best / 1e-3)
        width = WIDTHS[dtype]
        moved = batch * (width * k * (m + n) + max(width, 2) * m * n)
        return max(best, moved / (value["memory_share"] * self.hbm)) + float(value["launch_s"])

    def flash(
        self,
        kernel: str,
        batch: float,
        heads: float,
        kv_heads: float,
        queries: float,
        keys: float,
        width: int,
        *,
        causal: bool,
        backward: bool,
    ) -> float:
        """Return the seconds of a flash kernel; causal queries are the last ones of the keys."""
        entry = self.kernels["attention"][kernel]
        value = entry["backward" if backward and "backward" in entry else "forward"]["value"]
        per_pair = (10 if backward else 4) * width
        visited = keys - queries / 2 if causal else keys
        extra = value["prologue_keys"] / 2
        name = "narrow_exponent" if width < 128 else "wide_exponent"
        exponent = value.get(name, 0.06 if width < 128 else 0.0)
        rate = value["flop_per_s"] * (width / 128) ** exponent * self.clock
        total = batch * heads * queries * (visited + extra) * per_pair / rate
        longest = min(128, queries) * (keys + extra) * per_pair * self.sms / rate
        time = max(longest, total + value.get("tail", 0.0) * longest)
        time *= 1 + value.get("slowdown", 0.0) * math.log(1 + time / 1e-3)
        moved = 2 * batch * 2 * width * (queries * heads + keys * kv_heads) * (2 if backward else 1)
        return max(time, moved / (0.6 * self.hbm)) + float(value["launch_s"])


def step_terms(site: Site, job: Job) -> dict[str, float]:
    """Return the seconds of a step by term; their sum is the step."""
    return _Step(site, job).terms()


class _Step:
    """One job on one machine."""

    def __init__(self, site: Site, job: Job) -> None:
        self.site, self.job = site, job
        self.device = _Device(site)
        self.stack = _read("stacks", site.stack)
        self.bytes = {k: v["value"] for k, v in self.stack["bytes_per_element"].items()}
        self.host = {"partial_graphs": 0.7, **self.stack["host"]["value"]}
        defaults = {"sharded_network": 1.0, "gradients": 0.45, "regather": 1.3}
        self.overlap = defaults | self.stack["overlap"]["value"]
        gradient = self.stack["gradient"]["value"]
        added, reduced = job.accumulation_bytes, job.gradient_bytes
        self.added = gradient.get("accumulation_bytes", 0.0) if added is None else added
        self.reduced = gradient["reduce_bytes"] if reduced is None else reduced
        cast = {"row_bytes": 10.0, **self.stack["cast"]["value"]}
        self.cast_bytes = cast["row_bytes" if job.row_scales else "bytes"]
        self.tokens = job.micro_batch * job.seq / job.cp
        self.card = shown = _read("cards", site.card)
        self.link = shown["host"]["bytes_per_s"]["value"] * shown["host"]["efficiency"]["value"]
        joined = shown.get("collectives", {}).get("domain_gpus")
        self.per_node = shown["intra_node"]["max_gpus"]["value"]
        self.domain = joined["value"] if joined else self.per_node

    # ----------------------------------------------------------------------------------------------
    # Network

    def collective(self, kind: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of groups of ranks that are `stride` apart."""
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.domain // stride))
        nodes = math.ceil(ranks / near)
        shape = GroupShape(ranks, min(near, ranks - (nodes - 1) * near), near, nodes)
        return seconds(self.site.network, kind, size, shape, self.site.factors)

    def message(self, size: float, span: int) -> float:
        """Return the seconds of a message among `span` neighbouring ranks."""
        network, factors = self.site.network, self.site.factors
        if span > self.domain:
            rate = network.adapter_bytes_per_s * network.adapter_share * factors.cross_node
            return network.p2p_net_base_s + size / rate
        rate = network.link_bytes_per_s * network.p2p_share * factors.in_node
        return network.p2p_base_s + size / rate

    # ----------------------------------------------------------------------------------------------
    # A layer: (term, module, forward, backward)

    def linear(self, outputs: float, inputs: float, dtype: str) -> tuple[float, float]:
        """Return forward and backward of a linear layer."""
        device, n = self.device, self.tokens
        forward = device.product(n, outputs, inputs, dtype)
        inner = device.product(n, inputs, outputs, dtype)
        outer = device.product(outputs, inputs, n, dtype) / 0.94
        factor = 2.95 if (outputs % 8 or inputs % 8) and dtype != "fp32" else 1.0
        if self.job.row_scales and WIDTHS[dtype] < 2:
            factor /= self.stack["cast"]["value"].get("row_scales_rate", 1.0)
        forward, inner, outer = factor * forward, factor * inner, factor * outer
        if self.job.frozen:
            return forward, inner
        if self.added:
            outer += device.moving(outputs * inputs * self.added, "optimizer")
        return forward, inner + outer

    def plain(self) -> str:
        """Return the precision of tensors that always have at least 16 bits."""
        return "bf16" if WIDTHS[self.job.precision] < 2 else self.job.precision

    def sent(self) -> float:
        """Return the bytes of one number in communication."""
        return WIDTHS[self.plain()]

    def elementwise(self, what: str, elements: float, gated: bool = False) -> tuple[float, float]:
        """Return forward and backward of an operation that the stack's document counts."""
        figure = self.bytes[what]
        per = figure["forward"] * (figure.get("gated", 1.0) if gated else 1.0), figure["backward"]
        if self.job.precision == "fp32":
            elements *= 2  # the document counts bytes of 16 bits
        forward, backward = (self.device.moving(elements * p) if p else 0.0 for p in per)
        return forward, backward

    def attention_kernel(self, block: Block) -> tuple[float, float]:
        """Return forward and backward of softmax(q k) v."""
        job, attention = self.job, block.attention
        assert attention is not None
        has = self.device.kernels["attention"]
        names = ["unfused"] if job.precision == "fp32" else [*self.stack["attention"], *has]
        kernel = job.attention_kernel or next(n for n in names if n == "unfused" or n in has)
        heads, width = attention.heads / job.tp, attention.width
        if kernel == "unfused":
            assert job.cp == job.rings or (job.heads_exchanged and job.rings == 1)
            heads /= job.cp / job.rings
            length, many = job.seq, job.micro_batch * heads
            dtype = self.plain()
            products = self.device.product(length, length, width, dtype, many)
            products += self.device.product(length, width, length, dtype, many)
            products *= (10.0 if width % 8 else 1.0) / 0.96
            scores = many * length * length
            return (
                products + self.device.moving(10.1 * scores, launches=3),
                2 * products + self.device.moving(12.4 * scores, launches=3),
            )
        kv_heads, part = max(1.0, attention.kv_heads / job.tp), job.seq / job.cp
        ranks, found = job.cp, []
        if job.heads_exchanged:
            # each rank has all tokens of a part of the heads
            group = job.cp // job.rings
            kv_heads = max(1.0, attention.kv_heads / job.tp / group)
            heads, part, ranks = heads / group, job.seq / job.rings, job.rings
        for backward in (False, True):

            def visit(
                keys: float, causal: bool, part: float = part, backward: bool = backward
            ) -> float:
                return self.device.flash(
                    kernel,
                    job.micro_batch,
                    heads,
                    kv_heads,
                    part,
                    keys,
                    width,
                    causal=causal,
                    backward=backward,
                )

            if not attention.causal:
                found.append(visit(job.seq, causal=False))
                continue
            if job.keys_gathered and job.cp > 1:
                # a rank has one of cp equal shares of the causal triangle
                found.append(visit(job.seq, causal=False, part=part / 2))
                continue
            # local keys first, then those of each other rank
            time = visit(part, causal=True)
            for _ in range(ranks - 1):
                time += visit(part / 2, causal=False)
            found.append(time)
        return found[0], found[1]

    def parts(self, block: Block) -> list[tuple[Any, ...]]:
        """Return the kernels of a layer: term, module, forward, backward.

        Products also have the shares that full and per-op recomputation repeat.
        """
        job, attention, mlp = self.job, block.attention, block.mlp
        assert attention is not None
        assert isinstance(mlp, Mlp)
        assert attention.latent is None
        h, n, t = block.hidden, self.tokens, job.tp
        q, k = attention.heads * attention.width, attention.kv_heads * attention.width
        # a rank holds one key-value head at least
        k = k * max(1.0, t / attention.kv_heads)
        first = mlp.width * (2 if mlp.gated else 1)
        dtype, found = job.precision, []
        casts = self.cast_bytes if WIDTHS[dtype] < 2 else 0
        torch = job.torch_layers
        # matrices in the order of their calls: per-op recomputation repeats every second one
        qkv = (q / t, k / t, k / t) if torch else ((q + 2 * k) / t,)
        up = (mlp.width / t, mlp.width / t) if torch and mlp.gated else (first / t,)
        for number, (module, widths, inputs) in enumerate(
            (
                ("attention", qkv, h),
                ("attention", (h,), q / t),
                ("mlp", up, h),
                ("mlp", (h,), mlp.width / t),
            )
        ):
            each = [self.linear(outputs, inputs, dtype) for outputs in widths]
            forward, backward = (sum(times) for times in zip(*each, strict=True))
            if self.added and not job.frozen:
                # one kernel adds the gradients of all of them
                backward -= (len(each) - 1) * self.device.launch
            if len(each) > 1:
                again = sum(times[0] for times in each[1::2]) / forward
            else:
                of_mlp = (0.5, 0.0) if mlp.gated else (0.0, 1.0)
                again = (0.5, 1.0, *of_mlp)[number]
            whole = 0.0 if torch and number == 3 else 1.0
            found.append(("gemm", module, forward, backward, whole, again))
            outputs = sum(widths)
            if casts:
                moved = (n * side * casts for side in (inputs, outputs))
                forward, backward = (self.device.moving(each) for each in moved)
                found.append(("cast", module, forward, backward))
        if attention.head_norms != "none":
            found.append(("memory", "attention", *self.elementwise("norm", n * (q + k) / t)))
        layout = self.elementwise("layout", 2 * n * (q + 2 * k) / t)
        found.append(("memory", "attention", *layout))
        if attention.rotary:
            rope = "rope" if job.fused_rotary or "plain_rope" not in self.bytes else "plain_rope"
            found.append(("memory", "attention", *self.elementwise(rope, n * (q + k) / t)))
        found.append(("attention", "core_attn", *self.attention_kernel(block)))
        activation = self.elementwise("activation", n * first / t, mlp.gated)
        found.append(("memory", "mlp", *activation))
        kept = n * h / (t if job.sequence_parallel else 1)
        for _ in range(2):
            found.append(("memory", "layernorm", *self.elementwise("norm", kept)))
            found.append(("memory", "residual", *self.elementwise("residual", kept)))
        return found

    def tensor(self, block: Block) -> tuple[float, float, int]:
        """Return forward and backward seconds of TP communication, and its collectives."""
        job, size = self.job, self.tokens * block.hidden * self.sent()
        if job.tp == 1:
            return 0.0, 0.0, 0
        if not job.sequence_parallel:
            time = self.collective("allreduce", size, job.tp, 1)
            return 2 * time, 2 * time, 4
        gather = self.collective("allgather", size, job.tp, 1)
        if job.torch_layers and job.precision == "fp8" and not job.row_scales:
            gather /= 2  # in 8 bits
        scatter = self.collective("reducescatter", size, job.tp, 1)
        return 2 * (gather + scatter), 2 * (scatter + self.overlap["regather"] * gather), 10

    def ring(self, block: Block) -> tuple[float, float, int]:
        """Return the time that a ring of keys and values adds to its attention."""
        job, attention = self.job, block.attention
        assert attention is not None
        if job.cp == 1:
            return 0.0, 0.0, 0
        heads = max(attention.kv_heads / job.tp, 1.0)
        if job.heads_exchanged:
            own = attention.heads / job.tp
            sizes = (self.tokens * n * attention.width * self.sent() for n in (own, heads) * 2)
            group = job.cp // job.rings
            once = sum(self.collective("all2all", size, group, job.tp) for size in sizes)
            if job.rings == 1:
                return once, once, 8
            ring, ring_back, calls = self.passed(block, heads, job.rings)
            return once + ring, once + ring_back, 8 + calls
        if job.torch_layers:
            heads = attention.heads / job.tp  # keys and values of every query head
        if job.keys_gathered or job.torch_layers:
            size = job.cp * self.tokens * heads * attention.width * self.sent()
            gather = 2 * self.collective("allgather", size, job.cp, job.tp)
            scatter = 2 * self.collective("reducescatter", size, job.cp, job.tp)
            return gather, gather + scatter, 6
        return self.passed(block, heads, job.cp)

    def passed(self, block: Block, heads: float, ranks: int) -> tuple[float, float, int]:
        """Return the exposed time of keys and values in a ring of `ranks` ranks."""
        job, attention = self.job, block.attention
        assert attention is not None
        size = self.tokens * 2 * heads * attention.width * self.sent()
        once = self.message(size, job.tp * job.cp) * (ranks - 1)
        found = []
        for kernel, sent in zip(self.attention_kernel(block), (once, 2 * once), strict=True):
            longer, shorter = max(kernel, sent), min(kernel, sent)
            found.append(longer + 0.1 * shorter - kernel)
        return found[0], found[1], 3 * (ranks - 1)

    def layer(self, block: Block) -> dict[str, float]:
        """Return the seconds of a layer's micro-batch by term; `waited` is host overhead."""
        job, parts = self.job, self.parts(block)
        terms = dict.fromkeys(["gemm", "attention", "memory", "cast", "recompute"], 0.0)
        for term, _, forward, backward, *_ in parts:
            terms[term] += forward + backward
        forward, backward, calls = self.tensor(block)
        ring, ring_back, messages = self.ring(block)
        hidden = self.overlap["tensor"] if job.overlap_tensor else 0.0
        shown = 1 - (hidden / 2 if job.torch_layers and job.row_scales else hidden)
        terms["tensor"] = shown * (forward + backward)
        terms["context"] = ring + ring_back
        if job.recompute == "full":
            skipped = sum(part[2] for part in parts if len(part) > 4 and not part[4])
            terms["recompute"] = sum(part[2] for part in parts) - skipped + ring
            terms["tensor"] += shown * forward * (0.75 if job.torch_layers else 1.0)
        elif "per_op" in job.recompute:
            again = {"cast": 0.5, "memory": 1.0, "attention": 0.0}
            terms["recompute"] = sum(
                (part[5] if len(part) > 4 else again[part[0]]) * part[2] for part in parts
            )
            terms["tensor"] += shown * forward / 2
        else:
            terms["recompute"] = sum(part[2] for part in parts if part[1] in job.recompute)
            if "core_attn" in job.recompute:
                terms["recompute"] += ring
        # copies to the host overlap the layer's forward, copies back its whole backward
        ahead = sum(part[2] for part in parts) + shown * forward + ring
        copied = block.offloaded_bytes / self.link if block.offloaded_bytes else 0.0
        behind = sum(terms.values()) - ahead
        terms["offload"] = max(0.0, copied - ahead) + max(0.0, copied - behind)
        terms["sharding"] = self.sharding(block, sum(terms.values())) if job.zero == 3 else 0.0
        host = self.host["forward_s"] * (2 if job.recompute == "full" else 1)
        host += self.host["backward_s"] + (calls + messages) * self.host["collective_s"]
        graphs = {"none": 1.0, "partial": self.host["partial_graphs"], "full": 0.0}
        terms["waited"] = host * graphs[job.graphs]
        return terms

    # ----------------------------------------------------------------------------------------------
    # Weights

    def weights(self, block: Block) -> float:
        """Return the parameters of a layer: matrices, and the weights of two norms."""
        attention, mlp, h = block.attention, block.mlp, block.hidden
        assert attention is not None
        assert isinstance(mlp, Mlp)
        projections = 2 * attention.heads + 2 * attention.kv_heads
        return h * (projections * attention.width + (3 if mlp.gated else 2) * mlp.width + 2)

    def gather(self, weights: float) -> float:
        job = self.job
        shards = job.dp * job.cp // job.replicas
        time = self.collective("allgather", self.sent() * weights, shards, job.tp)
        return time / self.overlap["sharded_network"]

    def scatter(self, weights: float) -> float:
        job = self.job
        if job.frozen:
            return 0.0
        return self.sharded_sum(self.reduced * weights) / self.overlap["sharded_network"]

    def sharding(self, block: Block, device: float) -> float:
        """Return the time that ZeRO-3 communication adds to a layer whose kernels take `device`."""
        own = self.weights(block) / self.job.tp
        traffic = (2 if self.job.reshard else 1) * self.gather(own) + self.scatter(own)
        both = max(device, traffic) + self.overlap["fully_sharded"] * min(device, traffic)
        job, copies = self.job, self.stack.get("copies")
        if copies and job.dp * job.cp // job.replicas > 1:
            moved = copies["value"]["gather"] * self.sent() * (2 if job.reshard else 1)
            if not job.frozen:
                moved += copies["value"]["gradient_bytes"]
            both += self.device.moving(own * moved, launches=0)
        return both - device

    # ----------------------------------------------------------------------------------------------
    # Stages and the step

    def split(self) -> list[list[tuple[Block, int]]]:
        """Return blocks and layers of every stage: the ends are the last to get one more layer."""
        job = self.job
        layers = [block for block in job.blocks for _ in range(block.number)]
        counts = [len(layers) // job.pp for _ in range(job.pp)]
        order = [*range(1, job.pp - 1), 0, job.pp - 1] if job.pp > 1 else [0]
        for index in range(len(layers) % job.pp):
            counts[order[index]] += 1
        stages = []
        for count in counts:
            mine, layers = layers[:count], layers[count:]
            stages.append([(block, mine.count(block)) for block in dict.fromkeys(mine)])
        # MTP layers: each is like the last layer, on the stage of the head
        stages[-1] += [(job.blocks[-1], 1)] * job.mtp
        return stages

    def stage(self, index: int, blocks: list[tuple[Block, int]]) -> tuple[dict[str, float], float]:
        """Return the terms of a micro-batch on a stage, and the parameters per rank."""
        job = self.job
        terms: dict[str, float] = {}
        weights = 0.0
        for block, number in blocks:
            for term, value in self.layer(block).items():
                terms[term] = terms.get(term, 0.0) + number * value
            weights += number * self.weights(block) / job.tp
        table = job.vocab * job.blocks[0].hidden / job.tp
        first, last = index == 0, index == job.pp - 1
        if first:
            terms["memory"] += self.embedding(table)
            weights += table
        if last:
            for term, value in self.head().items():
                terms[term] += (1 + job.mtp) * value
            for _ in range(job.mtp):
                for term, value in self.joining(table).items():
                    terms[term] += value
                weights += 2 * job.blocks[-1].hidden ** 2 / job.tp
            if job.mtp and not first:
                weights += table
            if not (job.tied and job.pp == 1):
                weights += table
        if job.zero == 3 and (first or last):
            held = 2 * table if first and last and not job.tied else table
            moved = self.gather(held) + self.scatter(held)
            terms["sharding"] += moved
        waited = terms.pop("waited")
        if job.offloaded_weights:
            layers = sum(number * self.weights(block) for block, number in blocks)
            shards = job.tp * job.cp * job.dp / job.replicas
            loads = 2 * self.sent() * layers / shards / self.link
            terms["offload"] += max(0.0, loads - sum(terms.values()))
        device = sum(terms.values())
        largest = max(device, waited)
        ratio = min(device, waited) / largest
        terms["host"] = largest * (1 + ratio**3) ** (1 / 3) - device
        terms["transfer"] = self.transfer()
        return terms, weights

    def embedding(self, table: float) -> float:
        """Return the seconds of the lookup and of the gradient of the table."""
        moved = self.tokens * self.job.blocks[0].hidden * 8
        more = 0.0 if self.job.frozen else table * (2 + self.added)
        return self.device.moving(moved, "permute") + self.device.moving(moved + more, "permute")

    def joining(self, table: float) -> dict[str, float]:
        """Return the terms of joining token embedding and hidden state before an MTP layer."""
        job, h = self.job, self.job.blocks[-1].hidden
        kept = self.tokens * h / (job.tp if job.sequence_parallel else 1)
        memory = self.embedding(table) + sum(self.elementwise("norm", 2 * kept))
        cast = 0.0
        moved = self.cast_bytes if WIDTHS[job.precision] < 2 else 0
        if moved:
            for side in (2 * h, h / job.tp):
                cast += self.device.moving(self.tokens * side * moved)
        forward, backward, _ = self.tensor(job.blocks[-1])
        return {
            "gemm": sum(self.linear(h / job.tp, 2 * h, job.precision)),
            "memory": memory,
            "cast": cast,
            "tensor": (forward + backward) / 2,  # one half of a layer
        }

    def head(self) -> dict[str, float]:
        """Return the terms of final norm, head and loss, TP communication included."""
        job, n, h = self.job, self.tokens, self.job.blocks[-1].hidden
        unit = 128 * job.tp
        columns = (job.vocab + unit - 1) // unit * unit / job.tp
        if job.tp == 1 and job.vocab % 8:
            columns = job.vocab
        loss = self.bytes["cross_entropy"]["forward"], self.bytes["cross_entropy"]["backward"]
        memory = sum(self.device.moving(n * columns * b, "softmax", 3) for b in loss)
        memory += sum(self.elementwise("norm", n * h / (job.tp if job.sequence_parallel else 1)))
        dtype = job.precision if job.low_precision_head else self.plain()
        gemm, cast = sum(self.linear(columns, h, dtype)), 0.0
        if WIDTHS[dtype] < 2 and self.cast_bytes:
            cast = sum(self.device.moving(n * side * self.cast_bytes) for side in (h, columns))
        sends = self.collective("allreduce", self.sent() * n * h, job.tp, 1)
        sends += 3 * self.collective("allreduce", 4 * n, job.tp, 1)
        return {"gemm": gemm, "cast": cast, "memory": memory, "tensor": sends}

    def transfer(self) -> float:
        """Return the seconds that stages wait for the messages of a micro-batch."""
        job = self.job
        if job.pp == 1:
            return 0.0
        size = self.sent() * self.tokens * job.blocks[0].hidden / job.tp
        once = 80e-6 + self.message(size, job.tp * job.cp * job.dp * job.pp)
        return (0.6 * job.vpp if job.vpp > 1 else 2) * once

    def reduction(self, weights: float) -> float:
        """Return the seconds of the data-parallel gradient reduction."""
        job = self.job
        if job.zero == 3 or job.frozen:
            return 0.0
        ranks = job.dp * job.cp
        if not job.zero:
            return self.collective("allreduce", weights * self.reduced, ranks, job.tp)
        gathered = self.collective(
            "allgather", weights * self.sent(), ranks // job.replicas, job.tp
        )
        return self.sharded_sum(weights * self.reduced) + gathered

    def sharded_sum(self, size: float) -> float:
        """Return the seconds of a gradient reduction in which each rank keeps one shard."""
        shards = self.job.dp * self.job.cp // self.job.replicas
        near = self.collective("reducescatter", size, shards, self.job.tp)
        stride = self.job.tp * shards
        return near + self.collective("allreduce", size / shards, self.job.replicas, stride)

    def update(self, weights: float) -> float:
        """Return the seconds of the optimizer."""
        job = self.job
        if job.frozen or not job.optimizer:
            return 0.0
        own = weights * job.replicas / (job.dp * job.cp) if job.zero else weights
        resident = own if job.zero == 3 else weights
        per_own = job.optimizer_bytes or self.stack["optimizer"]["value"]["bytes"]
        per_own -= 2 * (12 - job.state_bytes)
        away = own * job.optimizer_offload
        moved = (own - away) * per_own + resident * 2 * self.reduced
        return self.device.moving(moved, "optimizer", 4) + self.host_update(away)

    def host_update(self, away: float) -> float:
        """Return the seconds of the host's Adam on `away` parameters, and of its copies."""
        job = self.job
        if not away:
            return 0.0
        # weight, gradient and two moments of 4 bytes are read, all but the gradient written
        adam = away * 28 / (0.25 * self.card["host"]["memory_bytes_per_s"]["value"])
        back = 0.0 if job.offloaded_weights else self.sent() if job.offloaded_master else 4.0
        down, up = away * 4 / self.link, away * back / self.link
        return max(adam, down, up) if job.overlap_offload else adam + down + up

    def terms(self) -> dict[str, float]:
        """Return the seconds of the step by term."""
        job = self.job
        split = self.split()
        stages = [self.stage(index, blocks) for index, blocks in enumerate(split)]
        totals = [sum(terms.values()) for terms, _ in stages]
        worst = totals.index(max(totals))
        batches = job.global_batch // (job.micro_batch * job.dp)
        found = {term: batches * value for term, value in stages[worst][0].items()}
        # 1F1B fills and drains once; v chunks do so in 1 / v of the time
        found["bubble"] = (sum(totals) - totals[worst]) / (job.vpp if job.pp > 1 else 1)
        pipeline = sum(found.values())
        gradients = max(self.reduction(weights) for _, weights in stages)
        if job.overlap_gradients:
            late = max(0.0, gradients - self.overlap["gradients"] * pipeline / batches)
            gradients = late + 0.05 * gradients
        if (job.tied or job.mtp) and job.pp > 1 and not job.frozen:
            size = job.vocab * job.blocks[0].hidden / job.tp * self.reduced
            stride = job.tp * job.cp * job.dp * (job.pp - 1)
            gradients += self.collective("allreduce", size, 2, stride)
        found["gradients"] = gradients
        once = 0.0
        moved = self.stack["cast"]["value"]["bytes"]
        if moved and WIDTHS[job.precision] < 2 and not job.frozen:
            for block, number in split[worst]:
                held = self.weights(block) / job.tp
                once += number * self.device.moving(held * moved)
        found["cast"] += once
        doublings = math.log2(max(1.0, job.gpus / self.per_node))
        found["stragglers"] = (pipeline + gradients + once) * 0.0013 * doublings
        found["optimizer"] = max(self.update(weights) for _, weights in stages)
        return found

"""Presets of Megatron-Bridge's performance recipes by model, device and precision.

Rows of `_TABLE` are presets of `scripts/performance/configs/*/*_workload_base_configs.py`, as of
the release that moved them to flat recipes (`src/megatron/bridge/perf_recipes`). A flat recipe
without a variant in its name is v2, or v1 if there is no v2. `search.engines.bridge.recipes`
contains the settings common to a model family. Some precisions on B200 and B300, VR200, and the
MLPerf variants are not included.
"""

from __future__ import annotations

from functools import cache

from autopar.records import Record


class Preset(Record):
    """Degrees, batch sizes and options of a performance recipe."""

    variant: str
    num_gpus: int
    global_batch: int
    micro_batch: int
    tp: int
    pp: int
    cp: int
    vp: int | None
    """Virtual pipeline size, chunks per stage; None: one chunk."""
    ep: int
    etp: int | None
    fsdp: bool
    offload: int | None
    """Number of layers whose activations are offloaded; None: no offload."""
    recompute_layers: int | None
    recompute_modules: tuple[str, ...] | None
    graphs: str | None
    """Value of `cuda_graph_impl`; None: not set."""
    graph_scope: tuple[str, ...]
    dispatcher: str | None
    """Value of `moe_flex_dispatcher_backend`; None: all-to-all dispatcher."""
    overlap_experts: bool
    layout: str | None
    fused_mlp: bool
    fp8_attention: bool
    fp8_head: bool


_TABLE = """
llama3_8b    h100        bf16               v1     8  128       1  1  1 2 -  1 -
llama3_8b    h100        fp8_cs             v1     8  128       1  1  1 1 -  1 -  rl=5
llama3_8b    b200,gb200  bf16,fp8_cs,fp8_mx v1     8  128       2  1  1 1 -  1 -  cg=local:full_iteration
llama3_8b    b300,gb300  bf16,fp8_cs,fp8_mx v1     8  128       4  1  1 1 -  1 -  cg=local:full_iteration
llama3_8b    gb300       nvfp4              v1     8  128       4  1  1 1 -  1 -  cg=local:full_iteration
llama3_8b    gb200       nvfp4              v1     8  128       4  1  1 1 -  1 -  cg=none:full_iteration
llama3_8b    b200,b300   nvfp4              v1     8  128       4  1  1 1 -  1 -
llama3_70b   h100        bf16               v1,v2  64 128,256   1  4  4 2 5  1 -
llama3_70b   h100        fp8_cs             v1,v2  64 128,256   1  4  8 1 5  1 -
llama3_70b   b200        bf16               v1,v2  64 128,256   1  2  4 2 5  1 -  cg=local:full_iteration
llama3_70b   b200        fp8_cs             v1,v2  64 128,256   1  1  1 1 -  1 -  fsdp ol=5
llama3_70b   b200,gb200  fp8_mx             v1,v2  64 128,256   1  2  4 1 5  1 -
llama3_70b   b200        nvfp4              v1,v2  64 128,256   1  2  4 1 5  1 -
llama3_70b   gb200       nvfp4              v1,v2  64 128,256   1  2  4 1 5  1 -  cg=none:full_iteration
llama3_70b   gb200       bf16               v1,v2  64 128,256   1  1  1 1 -  1 -  fsdp ol=20
llama3_70b   gb200       fp8_cs             v1,v2  64 128,256   2  1  1 1 -  1 -  fsdp ol=40
llama3_70b   b300        bf16,fp8_cs        v1,v2  64 128,256   1  1  1 1 -  1 -  fsdp
llama3_70b   gb300       bf16               v1,v2  64 128,256   2  1  1 1 -  1 -  fsdp ol=30
llama3_70b   gb300       fp8_cs             v1,v2  64 128,256   2  1  1 1 -  1 -  fsdp ol=20
llama3_70b   b300,gb300  fp8_mx             v1,v2  64 128,256   1  1  4 1 5  1 -
llama3_70b   b300,gb300  nvfp4              v1,v2  64 128,256   1  1  4 1 5  1 -  cg=none:full_iteration
llama31_405b h100        bf16,fp8_cs        v1,v2  1024 512,1536 1 8  8 2 8  1 -
llama31_405b b200,gb200  bf16,fp8_mx        v2     256 1536     1  4 16 1 8  1 -
llama31_405b b200,gb200  fp8_cs             v2     256 1536     1  4 16 1 4  1 -
llama31_405b b200,gb200  nvfp4              v2     256 1536     1  4 16 1 8  1 -
llama31_405b b200        bf16,fp8_cs,fp8_mx v1     128 64       1  4  8 2 8  1 -
llama31_405b gb200       bf16,fp8_mx        v1     128 64       1  4  8 2 8  1 -
llama31_405b gb200       fp8_cs             v1     128 64       1  2  1 1 -  1 -  fsdp ol=92
llama31_405b b200,gb200  nvfp4              v1     128 64       1  4 16 1 8  1 -  rl=1
llama31_405b b300        bf16,fp8_cs,fp8_mx v1     128 64       1  2  8 1 8  1 -
llama31_405b b300        nvfp4              v1     128 64       1  4  8 2 4  1 -
llama31_405b gb300       bf16               v1     128 64       1  2  1 1 -  1 -  fsdp ol=40
llama31_405b gb300       fp8_cs             v1     128 64       1  2  1 1 -  1 -  fsdp ol=10
llama31_405b gb300       fp8_mx             v1     128 64       1  4  8 2 4  1 -
llama31_405b gb300       nvfp4              v1     128 64       1  4  8 1 4  1 -  cg=local:full_iteration
llama31_405b b300,gb300  bf16               v2     256 1536     1  2  1 1 -  1 -  fsdp ol=40
llama31_405b b300,gb300  fp8_cs             v2     256 1536     1  4  8 1 4  1 -
llama31_405b b300,gb300  fp8_mx             v2     256 1536     1  2  8 2 4  1 -
llama31_405b b300,gb300  nvfp4              v2     256 1536     1  4  8 1 4  1 -
qwen3_235b_a22b h100     bf16,fp8_cs        v1,v2  256 2048,8192 1 2  8 1 4 32 1  a2a
qwen3_235b_a22b b200     bf16               v1     64  1024     1  1  8 1 4  8 1
qwen3_235b_a22b b200     fp8_cs,fp8_mx,nvfp4 v1    64  1024     1  1  8 1 -  8 1
qwen3_235b_a22b b200     bf16               v2     256 8192     1  1  8 1 4  8 1
qwen3_235b_a22b b200     fp8_cs,fp8_mx,nvfp4 v2    256 8192     1  1  8 1 -  8 1
qwen3_235b_a22b b300     bf16,fp8_cs,fp8_mx,nvfp4 v1 64 1024    1  1  8 1 -  8 1
qwen3_235b_a22b b300     bf16,fp8_cs,fp8_mx,nvfp4 v2 256 8192   1  1  8 1 -  8 1
qwen3_235b_a22b gb200    bf16,fp8_cs,fp8_mx,nvfp4 v1 64 1024    1  1  8 1 -  8 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_235b_a22b gb200    bf16               v2     256 8192     1  1  8 1 -  8 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_235b_a22b gb200    fp8_cs,nvfp4       v2     256 8192     1  1  8 1 - 32 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_235b_a22b gb200    fp8_mx             v2     256 8192     1  1  8 1 3 32 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_235b_a22b gb300    bf16,fp8_cs,fp8_mx,nvfp4 v1 64 1024    2  1  1 1 - 64 1  ep=hybridep cg=transformer_engine:moe_router,moe_preprocess
qwen3_235b_a22b gb300    bf16,fp8_cs,nvfp4  v2     256 8192     2  1  4 1 - 32 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_235b_a22b gb300    fp8_mx             v2     256 8192     2  1  4 1 12 32 1 ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_30b_a3b h100       bf16               v1     16  1024     1  1  1 1 - 16 1  ep=hybridep cg=transformer_engine:moe_router,moe_preprocess
qwen3_30b_a3b h100       fp8_cs             v1     16  1024     1  1  1 1 - 16 1  ep=hybridep
qwen3_30b_a3b b200       bf16,fp8_cs,fp8_mx v1     8   512      4  1  1 1 -  8 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_30b_a3b gb200      bf16,fp8_cs        v1     8   512      4  1  1 1 -  8 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
qwen3_30b_a3b gb200      fp8_mx             v1     8   512      4  1  1 1 -  8 1  ep=hybridep cg=transformer_engine:moe_router,moe_preprocess
qwen3_30b_a3b b300,gb300 bf16,fp8_cs,fp8_mx v1     8   512      8  1  1 1 -  8 1  ep=hybridep cg=transformer_engine:moe_router,moe_preprocess
deepseek_v3  h100        bf16,fp8_cs,fp8_sc v1     1024 8192    1  2  8 1 4 64 1  ep=hybridep rm=mla_up_proj,mlp lay=Et|(tt|)*30mL
deepseek_v3  h100        bf16,fp8_cs        v2     1024 16384   1  2  8 1 4 64 1  ep=hybridep rm=mla_up_proj,mlp lay=Et|(tt|)*30mL
deepseek_v3  h100        fp8_sc             v2     1024 16384   1  2  8 1 2 64 1  ep=hybridep rm=mla_up_proj,mlp
deepseek_v3  b200        bf16,fp8_cs,fp8_mx,nvfp4 v1 256 2048   1  1 16 1 -  8 1  ep=hybridep rm=mla_up_proj
deepseek_v3  b200        bf16,fp8_cs        v2     256 4096     1  1 16 1 -  8 1  ep=hybridep rm=mla_up_proj
deepseek_v3  b200        fp8_mx             v2     256 4096     1  1  8 1 2 32 1  ep=deepep a2a rm=mla_up_proj,mlp lay=Et*4|(t*4|)*14tmL cg=transformer_engine:attn,moe_router,moe_preprocess
deepseek_v3  b200        nvfp4              v2     256 4096     1  1  8 1 2 32 1  ep=deepep a2a rm=mla_up_proj,layernorm,moe_act lay=Et*4|(t*4|)*14tmL cg=none:
deepseek_v3  b300        bf16,fp8_cs        v1,v2  256 2048,4096 1 1  8 1 2  8 1  ep=hybridep rm=mla_up_proj cg=transformer_engine:attn,moe_router,moe_preprocess
deepseek_v3  b300        fp8_mx             v1,v2  256 2048,4096 1 1  8 1 2  8 1  ep=hybridep a2a rm=mla_up_proj cg=full_iteration: fused fp8attn fp8head
deepseek_v3  b300        nvfp4              v1,v2  256 2048,4096 2 1  8 1 2  8 1  ep=hybridep rm=mla_up_proj cg=transformer_engine:attn,moe_router,moe_preprocess
deepseek_v3  gb200       bf16               v1,v2  256 2048,4096 1 1  4 1 4 64 1  ep=hybridep rm=mla_up_proj cg=transformer_engine:attn,moe_router,moe_preprocess
deepseek_v3  gb200       fp8_cs             v1,v2  256 2048,4096 1 1  4 1 4 64 1  ep=hybridep rm=mlp cg=transformer_engine:attn,moe_router,moe_preprocess
deepseek_v3  gb200       fp8_mx             v1,v2  256 2048,4096 1 1  4 1 4 64 1  ep=hybridep a2a rm=mla_up_proj cg=full_iteration: fused fp8head
deepseek_v3  gb200       nvfp4              v1,v2  256 2048,4096 1 1  4 1 4 64 1  ep=hybridep rm=mla_up_proj cg=full_iteration: fused
deepseek_v3  gb300       bf16               v1,v2  256 2048,4096 1 1  4 1 4 64 1  ep=hybridep rm=moe_act cg=transformer_engine:attn,moe_router,moe_preprocess
deepseek_v3  gb300       fp8_cs             v1,v2  256 2048,4096 2 1  2 1 8 32 1  ep=hybridep rm=mla_up_proj lay=Et*4|(t*4|)*14tmL
deepseek_v3  gb300       fp8_mx             v1,v2  256 2048,4096 1 1  2 1 8 32 1  ep=hybridep a2a rm= lay=Et*4|(t*4|)*14tmL cg=full_iteration: fused fp8attn fp8head
deepseek_v3  gb300       nvfp4              v1,v2  256 2048,4096 1 1  2 1 8 32 1  ep=hybridep rm= lay=Et*4|(t*4|)*14tmL cg=full_iteration: fused
gpt_oss_120b h100        bf16,fp8_cs        v1,v2  64  512,1280 1  1  4 1 -  8 1  rm=layernorm,moe_act
gpt_oss_120b gb200,b200  bf16,fp8_mx        v1     64  512      4  1  1 1 - 64 1  rm=layernorm,moe_act
gpt_oss_120b gb300,b300  bf16,fp8_mx        v1     64  512      4  1  1 1 - 64 1  cg=transformer_engine:attn,moe_router,moe_preprocess
gpt_oss_120b gb200       bf16               v2     64  1280     4  1  1 1 - 64 1  a2a rm=layernorm,moe_act
gpt_oss_120b gb200       fp8_mx             v2     64  1280     4  1  1 1 - 64 1  ep=hybridep a2a rm= cg=full_iteration: fused fp8attn fp8head
gpt_oss_120b b200        bf16,fp8_mx        v2     64  1280     4  1  1 1 -  8 1  rm=layernorm,moe_act
gpt_oss_120b gb300       bf16               v2     64  1280     4  1  1 1 - 64 1  cg=transformer_engine:attn,moe_router,moe_preprocess
gpt_oss_120b gb300       fp8_mx             v2     64  1280     4  1  1 1 - 16 1  ep=hybridep a2a rm= cg=full_iteration: fused fp8attn fp8head
gpt_oss_120b b300        bf16               v2     64  1280     4  1  1 1 -  8 1  ep=hybridep cg=transformer_engine:attn,moe_router,moe_preprocess
gpt_oss_120b b300        fp8_mx             v2     64  1280     4  1  1 1 -  8 1  ep=hybridep a2a rm= fused fp8attn cg=transformer_engine:attn,moe_router,moe_preprocess fp8head
"""  # noqa: E501
"""Columns: model, devices, precisions, variants, GPUs, global batch size, micro-batch size, tp, pp,
cp, virtual pipeline size, ep, etp. `-` means not set. A row of several variants may list one global
batch size for each. Options follow: `fsdp`; `ol` offloaded layers; `rl` recomputed layers; `rm`
recomputed modules; `cg` CUDA graphs and scope; `ep` dispatcher; `a2a` overlapped expert
communication; `lay` layout; `fused` experts; `fp8attn` fp8 attention."""


def preset_of(model: str, gpu: str, precision: str, variant: str | None) -> Preset | None:
    """Return the preset of a performance recipe; None: not in the table.

    variant : such as `v1`. None selects the newest variant, and so does v2 if the recipe has no v2,
        as in the performance scripts.
    """
    found = _presets().get((model, gpu, precision), ())
    for preset in found:
        if preset.variant == variant:
            return preset
    return found[-1] if found and variant in (None, "v2") else None


def preset_variants(model: str, gpu: str, precision: str) -> tuple[str, ...]:
    """Return the variants of a performance recipe in the table, such as `v1` and `v2`."""
    return tuple(preset.variant for preset in _presets().get((model, gpu, precision), ()))


@cache
def _presets() -> dict[tuple[str, str, str], tuple[Preset, ...]]:
    found: dict[tuple[str, str, str], list[Preset]] = {}
    for line in _TABLE.strip().splitlines():
        model, gpus, precisions, variants, *cells = line.split()
        batches = cells[1].split(",")
        for at, variant in enumerate(variants.split(",")):
            preset = _preset(variant, int(batches[at % len(batches)]), cells)
            for gpu in gpus.split(","):
                for precision in precisions.split(","):
                    found.setdefault((model, gpu, precision), []).append(preset)
    return {key: tuple(sorted(rows, key=lambda row: row.variant)) for key, rows in found.items()}


def _preset(variant: str, batch: int, cells: list[str]) -> Preset:
    micro, tp, pp, cp, vp, ep, etp = (None if c == "-" else int(c) for c in cells[2:9])
    assert micro is not None, "a preset has a micro-batch size"
    more = dict(cell.partition("=")[::2] for cell in cells[9:])
    graphs, _, scope = more.get("cg", "").partition(":")
    return Preset(
        variant=variant,
        num_gpus=int(cells[0]),
        global_batch=batch,
        micro_batch=micro,
        tp=tp or 1,
        pp=pp or 1,
        cp=cp or 1,
        vp=vp,
        ep=ep or 1,
        etp=etp,
        fsdp="fsdp" in more,
        offload=int(more["ol"]) if "ol" in more else None,
        recompute_layers=int(more["rl"]) if "rl" in more else None,
        recompute_modules=tuple(filter(None, more["rm"].split(","))) if "rm" in more else None,
        graphs=graphs or None,
        graph_scope=tuple(filter(None, scope.split(","))),
        dispatcher=more.get("ep"),
        overlap_experts="a2a" in more,
        layout=more.get("lay"),
        fused_mlp="fused" in more,
        fp8_attention="fp8attn" in more,
        fp8_head="fp8head" in more,
    )

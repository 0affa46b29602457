"""Transformers of images and videos, read from the `config.json` of transformers or diffusers.

Tokens are patches, and text where blocks attend to both. Weights of text encoders and of
autoencoders are not part of the models. Defaults are those of transformers 5.24 and diffusers 0.42.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from autopar.errors import DocumentError
from autopar.families.base import Config, Layers, Switch, Whole, WholeOrZero, divided_width
from autopar.families.consistency import checked_layer
from autopar.records import replace, shorten
from autopar.run.model import LayerSpec, ModelSpec

_TIME = 256
"""Width of the sinusoidal embedding of the time step, which two matrices make a condition."""
_TEXT = 512
"""Tokens of text in the pipelines of Flux, Wan and Qwen-Image."""


def _linear(inputs: int, outputs: int) -> int:
    """Return the parameters of a matrix with biases."""
    return inputs * outputs + outputs


def _embedder(inputs: int, hidden: int) -> int:
    """Return the parameters of two matrices that embed a vector, with an activation between."""
    return _linear(inputs, hidden) + _linear(hidden, hidden)


class _Patches(Config):
    """Model of bidirectional attention over patches, with biases and MLPs of two matrices."""

    classes: ClassVar[tuple[str, ...]] = ()
    """Classes of the layers in the library. DiT names none itself, and the vision towers of SigLIP
    and CLIP also name those of text, which FSDP then misses (accelerate 1.15, fsdp_utils.py)."""

    vocab_size: WholeOrZero = 0
    max_position_embeddings: Whole | None = None
    """Tokens of a sample if given by the user; files have none."""

    def block(self, hidden: int, heads: int, number: int, ffn: int, usual: int) -> LayerSpec:
        """Return a layer of attention and MLP; usual : tokens of a sample of the usual size."""
        return LayerSpec(
            num_layers=number,
            seq_length=self.max_position_embeddings or usual,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            ffn_hidden_size=ffn,
            causal=False,
            biases=True,
            norm_parameters_per_hidden=4,
        )

    def of_layers(
        self, path: Path, name: str, *layers: LayerSpec, first: int, last: int, rotary: bool = False
    ) -> ModelSpec:
        """Return the model; first, last : parameters before and after its layers."""
        for layer in layers:
            checked_layer(path, layer, self.keys)
        return ModelSpec(
            name=name,
            layers=layers,
            vocab_size=0,
            tied_embeddings=False,
            no_positions=not rotary,
            make_vocab_size_divisible_by=1,
            extra_embedding_parameters=first,
            extra_head_parameters=last,
            layer_classes=self.classes,
        )

    def refuse(self, path: Path, key: str, reason: str) -> None:
        """Raise DocumentError with the value of a key that a model file cannot express."""
        value = shorten(getattr(self, key))
        raise DocumentError(path, f"the value is {value}: {reason}", key=key)


# --------------------------------------------------------------------------------------------------
# Encoders of transformers


class _Vit(_Patches):
    classes: ClassVar = ("ViTLayer",)

    hidden_size: Whole = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Whole = 12
    intermediate_size: Whole = 3072
    hidden_act: Any = "gelu"
    image_size: Whole = 224
    patch_size: Whole = 16
    num_channels: Whole = 3
    qkv_bias: Switch = True
    architectures: Any = None
    id2label: Any = None

    class_tokens: ClassVar[int] = 1
    """Tokens in addition to the patches."""

    def spec(self, path: Path, name: str) -> ModelSpec:
        if not self.qkv_bias:
            self.refuse(path, "qkv_bias", "attention without biases is not supported")
        divided_width(path, self, "hidden_size", "num_attention_heads")
        layer = self.changed(
            self.block(
                self.hidden_size,
                self.num_attention_heads,
                self.num_hidden_layers,
                self.intermediate_size,
                self.patches + self.class_tokens,
            )
        )
        return self.of_layers(path, name, layer, first=self.before(), last=self.behind())

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def before(self) -> int:
        """Return the parameters of the patch embedding, the positions and the class token."""
        positions = (self.patches + 2 * self.class_tokens) * self.hidden_size
        return _linear(self.num_channels * self.patch_size**2, self.hidden_size) + positions

    def behind(self) -> int:
        """Return the parameters of the classifier, or of the pooler of a model without one."""
        return self.classifier(self.hidden_size) or _linear(self.hidden_size, self.hidden_size)

    def classifier(self, inputs: int) -> int:
        """Return the parameters of the classifier of a vector; 0 for a model without one."""
        if "ForImageClassification" not in str(self.architectures):
            return 0
        # transformers assumes two classes
        return _linear(inputs, len(self.id2label) if isinstance(self.id2label, dict) else 2)

    def changed(self, layer: LayerSpec) -> LayerSpec:
        """Return a usual layer with the parts of the family."""
        return layer


class _Dinov2(_Vit):
    classes: ClassVar = ("Dinov2Layer",)

    image_size: Whole = 224
    patch_size: Whole = 14
    mlp_ratio: Whole = 4
    use_swiglu_ffn: Switch = False
    use_mask_token: Switch = True
    num_register_tokens: WholeOrZero = 0

    def before(self) -> int:
        others = (self.use_mask_token + self.num_register_tokens) * self.hidden_size
        return _Vit.before(self) + others

    def behind(self) -> int:
        return self.classifier(2 * self.hidden_size)

    def changed(self, layer: LayerSpec) -> LayerSpec:
        width, gated = self.mlp_ratio * self.hidden_size, self.use_swiglu_ffn
        if gated:
            # `Dinov2SwiGLUFFN` of transformers
            width = (int(width * 2 / 3) + 7) // 8 * 8
        return replace(
            layer,
            seq_length=layer.seq_length
            + (0 if self.max_position_embeddings else self.num_register_tokens),
            ffn_hidden_size=width,
            gated_mlp=gated,
            # a trained scale of each part
            elementwise=2,
            extra_parameters=2 * self.hidden_size,
        )


class _Dinov2WithRegisters(_Dinov2):
    classes: ClassVar = ("Dinov2WithRegistersLayer",)

    patch_size: Whole = 16
    num_register_tokens: WholeOrZero = 4


class _Siglip(_Vit):
    classes: ClassVar = ("SiglipEncoderLayer",)

    vision_use_head: Switch = True

    class_tokens: ClassVar[int] = 0

    def behind(self) -> int:
        """Return the parameters of the pooling head: a query, attention, a norm and an MLP."""
        if not self.vision_use_head:
            return 0
        h, width = self.hidden_size, self.intermediate_size
        return h + 4 * _linear(h, h) + 2 * h + _linear(h, width) + _linear(width, h)


class _Clip(_Vit):
    classes: ClassVar = ("CLIPEncoderLayer",)

    patch_size: Whole = 32
    hidden_act: Any = "quick_gelu"

    def before(self) -> int:
        # a norm before the layers, and no biases of the patch embedding
        return _Vit.before(self) + self.hidden_size

    def behind(self) -> int:
        return self.classifier(self.hidden_size)

    def changed(self, layer: LayerSpec) -> LayerSpec:
        # quick_gelu also saves the sigmoid of its input
        quick = self.hidden_act == "quick_gelu"
        saved = math.ceil(self.intermediate_size / self.hidden_size) if quick else 0
        return replace(layer, elementwise=saved)


# --------------------------------------------------------------------------------------------------
# Diffusion transformers of diffusers


class _Diffusion(_Patches):
    keys: ClassVar = {**Config.keys, "num_heads": "num_attention_heads"}

    num_attention_heads: Whole
    attention_head_dim: Whole
    num_layers: Layers
    in_channels: Whole
    out_channels: Whole | None = None

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def modulation(self, vectors: int) -> int:
        """Return the parameters of the matrix that makes scales, shifts and gates."""
        return _linear(self.hidden, vectors * self.hidden)

    def conditioned(self, usual: int, *, number: int, ffn: int, **fields: Any) -> LayerSpec:
        """Return a layer whose norms have no weights but those of the condition (AdaLN-Zero)."""
        layer = self.block(self.hidden, self.num_attention_heads, number, ffn, usual)
        # scales of two norms and gates of two parts
        usual_fields = {"norm_parameters_per_hidden": 0, "elementwise": 4}
        return replace(layer, **{**usual_fields, **fields})

    def double(self, usual: int, *, normed: bool, number: int, **fields: Any) -> LayerSpec:
        """Return a layer of two streams with separate weights and joint attention.

        Tokens of both have the same width and pass as many GEMMs (arXiv 2403.03206, figure 2).
        """
        h, norms = self.hidden, 2 * self.attention_head_dim if normed else 0
        stream = 4 * _linear(h, h) + norms + _linear(h, 4 * h) + _linear(4 * h, h)
        whole = {"extra_parameters": stream + 2 * self.modulation(6), "qk_norms": normed}
        # the output of attention is copied for each stream
        whole["elementwise"] = 5
        return self.conditioned(usual, number=number, ffn=4 * h, **{**whole, **fields})

    def output(self, pixels: int) -> int:
        """Return the parameters of a modulated norm and the projection to patches."""
        return self.modulation(2) + _linear(self.hidden, pixels * self.pixel_channels)

    @property
    def pixel_channels(self) -> int:
        return self.out_channels or self.in_channels


class _Dit(_Diffusion):
    classes: ClassVar = ("BasicTransformerBlock",)

    num_attention_heads: Whole = 16
    attention_head_dim: Whole = 72
    num_layers: Layers = 28
    in_channels: Whole = 4
    sample_size: Whole = 32
    patch_size: Whole = 2
    num_embeds_ada_norm: Whole = 1000
    attention_bias: Switch = True
    norm_elementwise_affine: Switch = False

    def spec(self, path: Path, name: str) -> ModelSpec:
        if not self.attention_bias:
            self.refuse(path, "attention_bias", "attention without biases is not supported")
        if self.norm_elementwise_affine:
            self.refuse(path, "norm_elementwise_affine", "norms with weights are not supported")
        h, pixels = self.hidden, self.patch_size**2
        # diffusers has the embeddings of time and class in every layer
        condition = _embedder(_TIME, h) + (self.num_embeds_ada_norm + 1) * h + self.modulation(6)
        usual = (self.sample_size // self.patch_size) ** 2
        layer = self.conditioned(
            usual, number=self.num_layers, ffn=4 * h, extra_parameters=condition
        )
        first = _linear(self.in_channels * pixels, h)
        return self.of_layers(path, name, layer, first=first, last=self.output(pixels))


class _Flux(_Diffusion):
    classes: ClassVar = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

    num_attention_heads: Whole = 24
    attention_head_dim: Whole = 128
    num_layers: Layers = 19
    num_single_layers: Layers = 38
    in_channels: Whole = 64
    joint_attention_dim: Whole = 4096
    pooled_projection_dim: Whole = 768
    patch_size: Whole = 1
    guidance_embeds: Switch = False

    def spec(self, path: Path, name: str) -> ModelSpec:
        h, usual = self.hidden, 4096 + _TEXT
        double = self.double(usual, normed=True, number=self.num_layers)
        single = self.conditioned(
            usual,
            number=self.num_single_layers,
            ffn=4 * h,
            qk_norms=True,
            num_norms=1,
            # scale, gate, and the outputs of attention and MLP as the input of one matrix, which
            # has one vector of biases
            elementwise=3,
            extra_parameters=self.modulation(3) - h,
        )
        times = (1 + self.guidance_embeds) * _embedder(_TIME, h)
        first = times + _embedder(self.pooled_projection_dim, h)
        first += _linear(self.in_channels, h) + _linear(self.joint_attention_dim, h)
        last = self.output(self.patch_size**2)
        return self.of_layers(path, name, double, single, first=first, last=last, rotary=True)


class _Sd3(_Diffusion):
    classes: ClassVar = ("JointTransformerBlock",)

    num_attention_heads: Whole = 18
    attention_head_dim: Whole = 64
    num_layers: Layers = 18
    in_channels: Whole = 16
    out_channels: Whole | None = 16
    sample_size: Whole = 128
    patch_size: Whole = 2
    joint_attention_dim: Whole = 4096
    caption_projection_dim: Whole = 1152
    pooled_projection_dim: Whole = 2048
    dual_attention_layers: Any = ()
    qk_norm: Any = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        if self.dual_attention_layers:
            self.refuse(path, "dual_attention_layers", "a second attention is not supported")
        h, pixels, normed = self.hidden, self.patch_size**2, self.qk_norm is not None
        # 77 tokens of CLIP and 256 of T5
        usual = (self.sample_size // self.patch_size) ** 2 + 77 + 256
        double = self.double(usual, normed=normed, number=max(1, self.num_layers - 1))
        # text ends in the attention of the last layer
        text = 3 * _linear(h, h) + (2 * self.attention_head_dim if normed else 0)
        ends = text + self.modulation(2) + self.modulation(6)
        last = replace(double, num_layers=1, extra_parameters=ends)
        layers = (double, last) if self.num_layers > 1 else (last,)
        first = _linear(self.in_channels * pixels, h) + _embedder(_TIME, h)
        first += _embedder(self.pooled_projection_dim, h)
        first += _linear(self.joint_attention_dim, self.caption_projection_dim)
        return self.of_layers(path, name, *layers, first=first, last=self.output(pixels))


class _QwenImage(_Diffusion):
    classes: ClassVar = ("QwenImageTransformerBlock",)

    num_attention_heads: Whole = 24
    attention_head_dim: Whole = 128
    num_layers: Layers = 60
    in_channels: Whole = 64
    out_channels: Whole | None = 16
    patch_size: Whole = 2
    joint_attention_dim: Whole = 3584
    use_additional_t_cond: Switch = False

    def spec(self, path: Path, name: str) -> ModelSpec:
        if self.use_additional_t_cond:
            self.refuse(path, "use_additional_t_cond", "a second condition is not supported")
        h, text = self.hidden, self.joint_attention_dim
        # norms of queries and keys are eager: each saves three tensors more than a fused one
        layer = self.double(4096 + _TEXT, normed=True, number=self.num_layers, elementwise=5 + 6)
        first = _embedder(_TIME, h) + text + _linear(self.in_channels, h) + _linear(text, h)
        last = self.output(self.patch_size**2)
        return self.of_layers(path, name, layer, first=first, last=last, rotary=True)


class _Wan(_Diffusion):
    classes: ClassVar = ("WanTransformerBlock",)

    num_attention_heads: Whole = 40
    attention_head_dim: Whole = 128
    num_layers: Layers = 40
    in_channels: Whole = 16
    out_channels: Whole | None = 16
    ffn_dim: Whole = 13824
    freq_dim: Whole = 256
    text_dim: Whole = 4096
    patch_size: tuple[Whole, ...] = (1, 2, 2)
    cross_attn_norm: Switch = True
    image_dim: Whole | None = None
    added_kv_proj_dim: Whole | None = None
    pos_embed_seq_len: Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        h, image, added = self.hidden, self.image_dim, self.added_kv_proj_dim
        # a table of the modulation, and the norm before cross-attention
        more = 6 * h + (2 * h if self.cross_attn_norm else 0)
        if added is not None:
            # keys and values of the 257 tokens of the first image
            more += 2 * _linear(added, h) + h
        layer = self.conditioned(
            # 81 frames of 480 x 832 pixels, for the transformer 21 x 60 x 104 latents
            21 * 30 * 52,
            number=self.num_layers,
            ffn=self.ffn_dim,
            cross_tokens=_TEXT + (257 if added is not None else 0),
            qk_norms=True,
            wide_qk_norms=True,
            num_norms=3 if self.cross_attn_norm else 2,
            fp32_norms=True,
            # the output of the MLP is gated in fp32
            elementwise=5,
            extra_parameters=more,
        )
        pixels = math.prod(self.patch_size)
        first = _linear(self.in_channels * pixels, h) + _embedder(self.freq_dim, h)
        first += self.modulation(6) + _embedder(self.text_dim, h)
        if image is not None:
            first += _linear(image, image) + _linear(image, h) + 2 * image + 2 * h
            first += (self.pos_embed_seq_len or 0) * image
        last = _linear(h, pixels * self.pixel_channels) + 2 * h
        return self.of_layers(path, name, layer, first=first, last=last, rotary=True)


IMAGES: dict[str, type[Config]] = {
    "clip_vision_model": _Clip,
    "dinov2": _Dinov2,
    "dinov2_with_registers": _Dinov2WithRegisters,
    "siglip_vision_model": _Siglip,
    "vit": _Vit,
    "DiTTransformer2DModel": _Dit,
    "FluxTransformer2DModel": _Flux,
    "QwenImageTransformer2DModel": _QwenImage,
    "SD3Transformer2DModel": _Sd3,
    "WanTransformer3DModel": _Wan,
}
"""Families by `model_type` of transformers, or by `_class_name` of diffusers."""

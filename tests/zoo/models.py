"""The model zoo: one short function for each architecture, nothing downloaded.

A function decorated with `@model` returns `(module, make_batch)`: `module(**make_batch(seed))` is a scalar
loss, so that a compiler sees the whole training forward, loss included. Every size is as small as the
architecture permits, dropout is 0 (random numbers would not match eager), and weights come from a fixed seed.
Initial scales are larger than the usual 0.02: near zero, attention is uniform whatever the mask, and a wrong
mask would pass.

Imports of model packages stay inside the functions: an environment without `timm` still has the rest.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
MakeBatch = Callable[[int], Batch]
Built = tuple[nn.Module, MakeBatch]
Config = dict[str, Any]


@dataclass(frozen=True)
class ZooModel:
    """An architecture of the zoo and what may be asked of it.

    Args:
        name: Name of the test.
        function: Builds the module and its batches.
        needs: Packages without which the model is left out.
        fullgraph: Whether Dynamo captures it, loss included, as one graph.
        xla: Whether it is also run on `xla` tensors.
        optimizer: "adamw" or "sgd".
        seed: First of two seeds of batches. Rounding can turn a unit of a ReLU on or off, and of 10^5 units one
            is often near enough to 0; with this seed, weights disturbed by 1e-6 in 30 ways leave every gradient
            within 1e-4.
    """

    name: str
    function: Callable[[], Built]
    needs: tuple[str, ...]
    fullgraph: bool
    xla: bool
    optimizer: str
    seed: int

    def __str__(self) -> str:
        return self.name

    def build(self) -> Built:
        """Builds the module, in training mode, and `make_batch`; equal at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, make_batch = self.function()
            _awaken(module)
        return module.train(), make_batch


MODELS: dict[str, ZooModel] = {}


def model(
    name: str,
    *,
    needs: str = "",
    fullgraph: bool = True,
    xla: bool = False,
    optimizer: str = "adamw",
    seed: int = 1,
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Registers a model under `name`, unless a package among the words of `needs` is missing."""
    packages = tuple(needs.split())

    def register(function: Callable[[], Built]) -> Callable[[], Built]:
        if all(importlib.util.find_spec(package) for package in packages):
            MODELS[name] = ZooModel(name, function, packages, fullgraph, xla, optimizer, seed)
        return function

    return register


def _awaken(module: nn.Module) -> None:
    """Disturbs constant parameters and statistics: no gradient passes a gain that starts at 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.get_buffer("running_mean").normal_(0, 0.1)
                layer.get_buffer("running_var").uniform_(0.5, 1.5)


# What turns a network into a loss ---------------------------------------------------------------------------


class OwnLoss(nn.Module):
    """The loss a Hugging Face model computes from its labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.net(**batch).loss


class CrossEntropy(nn.Module):
    """Cross entropy of `net(*inputs)`, its classes along `class_axis`."""

    def __init__(self, net: nn.Module, class_axis: int = -1) -> None:
        super().__init__()
        self.net = net
        self.class_axis = class_axis

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        logits = self.net(*inputs.values()).movedim(self.class_axis, -1)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class SquaredError(nn.Module):
    """Mean squared distance of `net(*inputs)` from a target."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, target: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(*inputs.values()), target)


# Batches ----------------------------------------------------------------------------------------------------

VOCABULARY = 96
CLASSES = 10


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(generator: torch.Generator, batch: int, length: int) -> torch.Tensor:
    """Token ids above the special ones, `i64[batch, length]`."""
    return torch.randint(4, VOCABULARY, (batch, length), generator=generator)


def _language(batch: int = 2, length: int = 12, padding: int = 0) -> MakeBatch:
    """Batches of a language model; of the second row, the last `padding` tokens are masked out."""

    def make_batch(seed: int) -> Batch:
        tokens = _tokens(_generator(seed), batch, length)
        if not padding:
            return {"input_ids": tokens, "labels": tokens.clone()}
        mask = torch.ones_like(tokens)
        mask[1, length - padding :] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    return make_batch


def _pictures(size: int, batch: int = 4, name: str = "images", dense: bool = False) -> MakeBatch:
    """Pictures `f32[batch, 3, size, size]` and a class for each one, or for each pixel if `dense`."""

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        pictures = torch.randn(batch, 3, size, size, generator=generator)
        shape = (batch, size, size) if dense else (batch,)
        return {name: pictures, "labels": torch.randint(CLASSES, shape, generator=generator)}

    return make_batch


# transformers: decoders -------------------------------------------------------------------------------------

_SPECIAL: Config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.15,
    **_SPECIAL,
}
_GROUPED: Config = {**_DECODER, "num_key_value_heads": 2}


def _causal(model_type: str, config: Config, batches: MakeBatch, **how: Any) -> Built:
    from transformers import AutoConfig, AutoModelForCausalLM

    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), **how)
    net.loss_type = "ForCausalLM"  # GPT-2's class name hides it, and a warning in the forward breaks the graph
    return OwnLoss(net), batches


@model("llama", needs="transformers", xla=True)
def llama() -> Built:
    """Grouped queries, padding."""
    return _causal("llama", _GROUPED, _language(padding=3))


@model("qwen2", needs="transformers")
def qwen2() -> Built:
    """Biased projections, tied embeddings."""
    return _causal("qwen2", {**_GROUPED, "tie_word_embeddings": True}, _language())


@model("qwen3", needs="transformers")
def qwen3() -> Built:
    """Normalised queries and keys, own width of a head."""
    return _causal("qwen3", {**_GROUPED, "head_dim": 16}, _language())


@model("mistral", needs="transformers")
def mistral() -> Built:
    """A sliding window shorter than the sequence."""
    return _causal("mistral", {**_GROUPED, "sliding_window": 4}, _language())


@model("gemma2", needs="transformers", xla=True)
def gemma2() -> Built:
    """Capped logits, alternating windows, tied embeddings, attention written out."""
    config = {**_GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
    return _causal("gemma2", config, _language(), attn_implementation="eager")


@model("phi3", needs="transformers")
def phi3() -> Built:
    """Joint projections, split after."""
    return _causal("phi3", _GROUPED, _language())


@model("gpt_neox", needs="transformers")
def gpt_neox() -> Built:
    """Parallel residuals, rotation of a part of each head."""
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = {**_DECODER, "rope_parameters": rotation}
    return _causal("gpt_neox", config, _language())


@model("olmo2", needs="transformers")
def olmo2() -> Built:
    """Norms after the blocks, and over all heads of queries and keys."""
    return _causal("olmo2", _GROUPED, _language())


@model("starcoder2", needs="transformers")
def starcoder2() -> Built:
    """Layer norms, a window, biased projections."""
    config = {**_GROUPED, "sliding_window": 6, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    return _causal("starcoder2", config, _language())


_DEEPSEEK: Config = {
    **_DECODER,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}


@model("deepseek_v3", needs="transformers", xla=True)
def deepseek_v3() -> Built:
    """Latent attention; one dense layer, one of experts run as batched products over gathered weights."""
    config = {**_DEEPSEEK, "first_k_dense_replace": 1}
    return _causal("deepseek_v3", config, _language(), experts_implementation="batched_mm")


@model("mixtral", needs="transformers")
def mixtral() -> Built:
    """Experts as transformers runs them by default: a grouped product, here its own custom operator."""
    config = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    return _causal("mixtral", config, _language(), experts_implementation="grouped_mm")


@model("gpt2", needs="transformers", xla=True)
def gpt2() -> Built:
    """Conv1D projections, learned positions, padding."""
    config = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "initializer_range": 0.15,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **_SPECIAL,
    }
    return _causal("gpt2", config, _language(padding=2))


@model("opt", needs="transformers")
def opt() -> Built:
    """Positions counted from the attention mask, attention written out."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "init_std": 0.15,
        "dropout": 0.0,
        **_SPECIAL,
    }
    return _causal("opt", config, _language(padding=2), attn_implementation="eager")


@model("mamba", needs="transformers", xla=True)
def mamba() -> Built:
    """A selective scan, unrolled in Python."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "expand": 2,
        "use_cache": False,
        **_SPECIAL,
    }
    return _causal("mamba", config, _language(length=6))


# transformers: encoders, pairs, pictures, speech ------------------------------------------------------------

# Left out, the kind of problem is written into the configuration by the first forward: Dynamo captures again.
_CLASSIFIER: Config = {"num_labels": CLASSES, "problem_type": "single_label_classification"}


@model("bert", needs="transformers", xla=True)
def bert() -> Built:
    """Masked language model, padding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return OwnLoss(BertForMaskedLM(config)), _language(padding=4)


@model("distilbert", needs="transformers")
def distilbert() -> Built:
    """Classification of sentences, padding."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=16,
        initializer_range=0.15,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        **_CLASSIFIER,
    )
    words = _language(batch=4, padding=4)

    def make_batch(seed: int) -> Batch:
        return {**words(seed), "labels": torch.randint(CLASSES, (4,), generator=_generator(seed))}

    return OwnLoss(DistilBertForSequenceClassification(config)), make_batch


@model("t5", needs="transformers", xla=True)
def t5() -> Built:
    """Encoder and decoder, relative positions, gated feed-forward.

    Without its cache, whose constructor copies the configuration and breaks the graph in torch 2.9.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        use_cache=False,
        **{**_SPECIAL, "decoder_start_token_id": 0},
    )

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        return {"input_ids": _tokens(generator, 2, 10), "labels": _tokens(generator, 2, 7)}

    return OwnLoss(T5ForConditionalGeneration(config)), make_batch


@model("vit", needs="transformers")
def vit() -> Built:
    """Patches through a convolution, a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        initializer_range=0.15,
        **_CLASSIFIER,
    )
    return OwnLoss(ViTForImageClassification(config)), _pictures(16, name="pixel_values")


@model("clip", needs="transformers", xla=True)
def clip() -> Built:
    """Two towers and a contrastive loss."""
    from transformers import CLIPConfig, CLIPModel

    tower: Config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, **_SPECIAL},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    pictures = _pictures(16, name="pixel_values")

    def make_batch(seed: int) -> Batch:
        batch = {"input_ids": _tokens(_generator(seed), 4, 8), "pixel_values": pictures(seed)["pixel_values"]}
        batch["input_ids"][:, -1] = _SPECIAL["eos_token_id"]
        return batch

    return OwnLoss(_WithReturnLoss(CLIPModel(config))), make_batch


class _WithReturnLoss(nn.Module):
    """CLIP computes its loss on request, not from labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: torch.Tensor):
        return self.net(**batch, return_loss=True)


@model("whisper", needs="transformers", fullgraph=False)
def whisper() -> Built:
    """Convolutions over a spectrogram, cross attention; a cache, at which torch 2.9 breaks the graph."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        init_std=0.15,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_SPECIAL,
    )

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        return {
            "input_features": torch.randn(2, 8, 24, generator=generator),
            "labels": _tokens(generator, 2, 6),
        }

    return OwnLoss(WhisperForConditionalGeneration(config)), make_batch


# timm -------------------------------------------------------------------------------------------------------


def _timm(name: str, size: int, **config) -> Built:
    import timm

    return CrossEntropy(timm.create_model(name, num_classes=CLASSES, **config)), _pictures(size)


@model("timm_resnet18", needs="timm", xla=True, optimizer="sgd", seed=5)
def timm_resnet18() -> Built:
    """Batch norms with statistics."""
    return _timm("resnet18", 64, channels=(8, 16, 24, 32))


@model("timm_convnext", needs="timm", xla=True, optimizer="sgd")
def timm_convnext() -> Built:
    """Depthwise convolutions, layer norm over channels, layer scale."""
    return _timm("convnext_atto", 64, dims=(8, 16, 24, 32), depths=(1, 1, 2, 1))


@model("timm_vit", needs="timm")
def timm_vit() -> Built:
    """Fused attention."""
    return _timm("vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


@model("timm_efficientnet", needs="timm", optimizer="sgd")
def timm_efficientnet() -> Built:
    """EfficientNet-B0's seven stages, one block each, a quarter of the width."""
    from timm.models.efficientnet import _gen_efficientnet

    net = _gen_efficientnet("efficientnet_b0", channel_multiplier=0.25, depth_multiplier=0.1, num_classes=CLASSES)
    return CrossEntropy(net), _pictures(64)


@model("timm_mobilenetv3", needs="timm", optimizer="sgd", seed=5)
def timm_mobilenetv3() -> Built:
    """Squeeze and excitation, hard activations; one block a stage, half the width."""
    from timm.models.mobilenetv3 import _gen_mobilenet_v3

    scale: Config = {"channel_multiplier": 0.5, "depth_multiplier": 0.1}
    net = _gen_mobilenet_v3("mobilenetv3_small_050", num_classes=CLASSES, **scale)
    return CrossEntropy(net), _pictures(64)


@model("timm_swin", needs="timm")
def timm_swin() -> Built:
    """Shifted windows: rolls, masks and a table of relative positions."""
    config: Config = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return _timm("swin_tiny_patch4_window7_224", 32, drop_path_rate=0.0, **config)


@model("timm_mixer", needs="timm")
def timm_mixer() -> Built:
    """Perceptrons over tokens and channels in turn."""
    from timm.models.mlp_mixer import MlpMixer

    net = MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, embed_dim=32, num_blocks=2)
    return CrossEntropy(net), _pictures(32)


# torchvision ------------------------------------------------------------------------------------------------


@model("torchvision_regnet", needs="torchvision", optimizer="sgd", seed=3)
def torchvision_regnet() -> Built:
    """Grouped convolutions, squeeze and excitation."""
    from torchvision.models.regnet import BlockParams, RegNet

    stages: Config = {"depths": [1, 1, 2, 1], "widths": [8, 16, 24, 32], "group_widths": [8, 8, 8, 16]}
    params = BlockParams(**stages, bottleneck_multipliers=[1.0] * 4, strides=[2] * 4, se_ratio=0.25)
    return CrossEntropy(RegNet(params, num_classes=CLASSES, stem_width=8)), _pictures(64)


@model("torchvision_squeezenet", needs="torchvision", optimizer="sgd")
def torchvision_squeezenet() -> Built:
    """Pools with ceil mode, concatenated branches."""
    from torchvision.models import squeezenet1_1

    return CrossEntropy(squeezenet1_1(num_classes=CLASSES, dropout=0.0)), _pictures(32)


@model("torchvision_shufflenet", needs="torchvision", optimizer="sgd", seed=3)
def torchvision_shufflenet() -> Built:
    """Channels split, shuffled by a transpose, joined."""
    from torchvision.models import ShuffleNetV2

    net = ShuffleNetV2([2, 2, 2], [8, 16, 32, 48, 64], num_classes=CLASSES)
    return CrossEntropy(net), _pictures(64)


@model("torchvision_densenet", needs="torchvision", optimizer="sgd", seed=3)
def torchvision_densenet() -> Built:
    """Every layer reads all that came before it."""
    from torchvision.models import DenseNet

    sizes: Config = {"growth_rate": 8, "block_config": (2, 2, 2), "num_init_features": 16}
    return CrossEntropy(DenseNet(**sizes, num_classes=CLASSES)), _pictures(32)


@model("torchvision_fcn", needs="torchvision", optimizer="sgd")
def torchvision_fcn() -> Built:
    """Segmentation: a class for each pixel, upsampled bilinearly."""
    from torchvision.models import resnet18
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    backbone = IntermediateLayerGetter(resnet18(), return_layers={"layer2": "out"})
    head = FCNHead(128, CLASSES)
    _without_dropout(head)
    return CrossEntropy(_Output(FCN(backbone, head)), class_axis=1), _pictures(32, dense=True)


class _Output(nn.Module):
    """The entry "out" of a segmentation model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)["out"]


def _without_dropout(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0


# diffusers --------------------------------------------------------------------------------------------------


@model("diffusers_unet", needs="diffusers", xla=True)
def diffusers_unet() -> Built:
    """Noise prediction, conditioned on a time and, by cross attention in the middle block, on a text."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    net = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=8,
    )

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        return {
            "sample": torch.randn(2, 4, 8, 8, generator=generator),
            "timestep": torch.randint(1000, (2,), generator=generator),
            "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
            "target": torch.randn(2, 4, 8, 8, generator=generator),
        }

    return SquaredError(_Sample(net)), make_batch


class _Sample(nn.Module):
    """The one field of a diffusion model's output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.net(sample, timestep, text).sample


# torch.nn ---------------------------------------------------------------------------------------------------


def _vectors(batch: int = 2, length: int = 6, width: int = 16, out: int = 16, memory: int = 0) -> MakeBatch:
    """Sequences `f32[batch, length, width]`, a target, and for decoders a memory of another length."""

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        batches = {"sequence": torch.randn(batch, length, width, generator=generator)}
        if memory:
            batches["memory"] = torch.randn(batch, memory, width, generator=generator)
        return {**batches, "target": torch.randn(batch, length, out, generator=generator)}

    return make_batch


@model("transformer_encoder", xla=True)
def transformer_encoder() -> Built:
    """Norms before the blocks; in eval, PyTorch's fused fast path is a candidate."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    return SquaredError(net), _vectors()


@model("transformer_decoder")
def transformer_decoder() -> Built:
    """Causal self attention, cross attention."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
            self.net = nn.TransformerDecoder(layer, 2)

        def forward(self, sequence: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(sequence.shape[1], device=sequence.device)
            return self.net(sequence, memory, tgt_mask=mask, tgt_is_causal=True)

    return SquaredError(Causal()), _vectors(memory=5)


class _UnrolledLSTM(nn.Module):
    """An LSTM as a Python loop over time: a deep chain of small operations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        hidden = cell = sequence.new_zeros(sequence.shape[0], self.cell.hidden_size)
        outputs = []
        for vectors in sequence.unbind(1):
            hidden, cell = self.cell(vectors, (hidden, cell))
            outputs.append(hidden)
        return torch.stack(outputs, 1)


@model("lstm_cell", xla=True)
def lstm_cell() -> Built:
    """`nn.LSTMCell` in a loop."""
    return SquaredError(_UnrolledLSTM()), _vectors()


class _Recurrent(nn.Module):
    """A recurrent network between two linear layers; Dynamo breaks the graph around it."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], directions: int) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.net = kind(16, 16, num_layers=2, batch_first=True, bidirectional=directions == 2)
        self.after = nn.Linear(16 * directions, 16)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.after(self.net(self.before(sequence).tanh())[0])


@model("lstm", fullgraph=False)
def lstm() -> Built:
    """`nn.LSTM`, two layers."""
    return SquaredError(_Recurrent(nn.LSTM, 1)), _vectors()


@model("gru", fullgraph=False)
def gru() -> Built:
    """`nn.GRU`, two layers, both directions (torch_xla replaces `nn.GRU`, but leaves this kind alone)."""
    return SquaredError(_Recurrent(nn.GRU, 2)), _vectors()


class _SeedAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `f32[batch, heads, length, width]`."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class _SeedLayer(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.attention = _SeedAttention(hidden, 4)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SeedDecoder(nn.Module):
    """The decoder of the benchmarks: RMS norms, rotary attention, gated feed-forward.

    Args:
        layers: Number of layers.
        hidden: Width of the residual stream.
        intermediate: Width inside the feed-forward.
        vocabulary: Number of tokens.
    """

    def __init__(self, layers: int = 2, hidden: int = 128, intermediate: int = 1024, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(_SeedLayer(hidden, intermediate) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@model("seed_decoder", xla=True)
def seed_decoder() -> Built:
    """The benchmarks' decoder, two layers; tokens and labels are views of one storage."""

    def make_batch(seed: int) -> Batch:
        tokens = torch.randint(256, (2, 9), generator=_generator(seed))
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    return CrossEntropy(SeedDecoder()), make_batch

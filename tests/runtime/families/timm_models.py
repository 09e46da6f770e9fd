"""Families of timm: tiny models of each, all without dropout and without stochastic depth.

Options are the arguments of the model's constructor; the name before is what `timm.create_model` takes.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from .catalogue import CLASSES, SAMPLES, Family, pictures

TRANSFORMER: Mapping[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}

STAGES: Mapping[str, Any] = {"depths": (1, 1, 1, 1)}
WIDTHS = (8, 16, 24, 32)

MODELS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", 32, TRANSFORMER),
    "deit": ("deit_tiny_distilled_patch16_224", 32, TRANSFORMER),
    "beit": ("beit_base_patch16_224", 32, TRANSFORMER),
    "eva": ("eva02_tiny_patch14_224", 32, TRANSFORMER),
    "cait": ("cait_xxs24_224", 32, TRANSFORMER | {"depth_token_only": 1}),
    "xcit": ("xcit_nano_12_p16_224", 32, TRANSFORMER | {"cls_attn_layers": 1}),
    "mixer": ("mlp_mixer.MlpMixer", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 4}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        32,
        {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "pvt_v2": ("pvt_v2_b0", 32, STAGES | {"embed_dims": WIDTHS, "num_heads": (1, 2, 2, 4), "sr_ratios": (2, 2, 1, 1)}),
    "twins": (
        "twins_svt_small",
        32,
        STAGES
        | {"img_size": 32, "embed_dims": WIDTHS, "num_heads": (1, 2, 2, 4), "sr_ratios": (2, 2, 1, 1)}
        | {"wss": (2, 2, 2, 1), "mlp_ratios": (2, 2, 2, 2)},
    ),
    "coat": (
        "coat_lite_tiny",
        32,
        {"img_size": 32, "embed_dims": (16, 16, 32, 32), "serial_depths": (1, 1, 1, 1), "num_heads": 8},
    ),
    "levit": (
        "levit_128s",
        64,
        {"img_size": 64, "embed_dim": (16, 24, 32), "num_heads": (2, 3, 4), "key_dim": 8, "depth": (1, 1, 1)},
    ),
    "maxvit": ("test_maxvit", 64, {"img_size": 64, "stem_width": 8, "head_hidden_size": 32}),
    "poolformer": ("metaformer.MetaFormer", 32, STAGES | {"dims": WIDTHS}),
    "convnext": ("convnext_atto", 32, STAGES | {"dims": WIDTHS}),
    "resnet": ("resnet18", 64, {"layers": (1, 1, 1, 1), "channels": WIDTHS}),
    "regnet": ("regnetx_002", 64, {"depth": 6, "w0": 8, "wa": 8.0, "wm": 2.0, "group_size": 8, "stem_width": 8}),
    "densenet": ("densenet.DenseNet", 64, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "efficientnet": ("test_efficientnet", 64, {}),
    "mobilenet": ("mobilenetv3_small_050", 64, {}),
}


def _made(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build a model that is registered, or one of a class, `<module>.<class>`, whose settings registered ones fix."""
    import timm

    module, _, kind = name.rpartition(".")
    if module:
        return getattr(import_module(f"timm.models.{module}"), kind)(num_classes=CLASSES, **options)
    return timm.create_model(name, num_classes=CLASSES, drop_path_rate=0.0, **options)


MANY = {"levit": 32, "densenet": 32}
"""Samples of a batch where norms see few values of a microbatch: of two, they leave little but the signs."""


def _family(family: str, name: str, size: int, options: Mapping[str, Any]) -> Family:
    return Family(family, "timm", lambda: _made(name, options), pictures(size, MANY.get(family, SAMPLES)))


FAMILIES: tuple[Family, ...] = tuple(_family(family, *model) for family, model in MODELS.items())

"""Layouts against the processors of transformers and mlx-vlm: the same sizes, grids and numbers of tokens."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import BadMedia, ModelError, Unsupported
from ingot.media.any_size_processors import (
    Gemma4Processor,
    LfmProcessor,
    Llama4Processor,
    MergedPatchesProcessor,
    MiniCpmProcessor,
    Phi4Processor,
    llama4_canvas,
)
from ingot.media.image_processors import (
    PROCESSORS,
    GemmaProcessor,
    IdeficsProcessor,
    InternVLProcessor,
    LlavaProcessor,
    Phi3Processor,
    PixtralProcessor,
    QwenProcessor,
    read_processor,
)
from ingot.media.layout import ImageLayoutOptions, MediaProcessor, Size, VideoHeader, VideoLayoutOptions
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.vision.loading import VISION_FAMILIES
from tests.templates.real import SHELF

ANY = ImageLayoutOptions()


def sizes(count: int, longest: int, seed: int = 7) -> list[Size]:
    """Small ones, square ones, and such as lie just beside a border."""
    drawn = random.Random(seed)
    found = [Size(1, 1), Size(28, 28), Size(27, 29), Size(longest, longest), Size(longest, 40), Size(40, longest)]
    return found + [Size(drawn.randint(1, longest), drawn.randint(1, longest)) for _ in range(count)]


def upstream(module: str, name: str) -> Any:
    """A name of another package's, if that is here with all that it needs."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError, AttributeError) as missing:
        pytest.skip(f"{module} cannot be imported: {missing}")


def transformers(family: str, file: str, name: str) -> Any:
    return upstream(f"transformers.models.{family}.{file}", name)


def sensible(found: Iterable[Size]) -> list[Size]:
    return [size for size in found if size.aspect <= 200]


@pytest.mark.parametrize(("patch", "least", "most"), [(14, 56 * 56, 28 * 28 * 1280), (16, 65536, 16777216)])
def test_qwen_resizes_pictures_as_its_processor_does(patch: int, least: int, most: int) -> None:
    resize = transformers("qwen2_vl", "image_processing_pil_qwen2_vl", "smart_resize")
    files = ProcessorFiles(
        {"model_type": "qwen2_vl"}, {"patch_size": patch, "size": {"shortest_edge": least, "longest_edge": most}}
    )
    ours = QwenProcessor.of(files)
    for size in sensible(sizes(300, 5000)):
        height, width = resize(size.height, size.width, patch * 2, least, most)
        layout = ours.image_layout(size, ANY)
        assert layout.size == (width, height), size
        assert layout.grid == (1, height // patch, width // patch)
        assert layout.runs == (height * width // (patch * 2) ** 2,)


def test_qwen_3_resizes_clips_by_one_budget_for_all_frames() -> None:
    resize = transformers("qwen3_vl", "video_processing_qwen3_vl", "smart_resize")
    least, most = 4096, 25165824
    clips = {"size": {"shortest_edge": least, "longest_edge": most}, "fps": 2, "min_frames": 4, "max_frames": 768}
    ours = QwenProcessor.of(ProcessorFiles({"model_type": "qwen3_vl"}, {"patch_size": 16, "merge_size": 2}, clips))
    drawn = random.Random(3)
    for size in sensible(sizes(150, 2000)):
        header = VideoHeader(size, drawn.randint(2, 5000), drawn.choice([1, 12.5, 24, 29.97, 60]))
        layout = ours.video_layout(header, VideoLayoutOptions())
        count = min(max(int(header.frames / header.fps * 2), 4), 768, header.frames)
        height, width = resize(count, size.height, size.width, 2, 32, least, most)
        assert layout.size == (width, height), header
        assert layout.frames[:count] == tuple(np.linspace(0, header.frames - 1, count).round().astype(int))
        assert layout.grid.t == -(-count // 2) == len(layout.times) == len(layout.runs)
        assert layout.features == layout.grid.patches // 4


def test_qwen_3_tells_each_pair_of_frames_its_time() -> None:
    ours = QwenProcessor.of(ProcessorFiles({"model_type": "qwen3_vl"}))
    layout = ours.video_layout(VideoHeader(Size(64, 64), 100, 10.0), VideoLayoutOptions(frames=4))
    assert layout.frames == (0, 33, 66, 99) and layout.times == (1.65, 8.25)
    block = "<|vision_start|><|video_pad|><|vision_end|>"
    assert layout.written == f"<{1.65:.1f} seconds>{block}<{8.25:.1f} seconds>{block}"


def test_qwen_2_gives_every_frame_the_same_budget_and_writes_one_run() -> None:
    ours = QwenProcessor.of(ProcessorFiles({"model_type": "qwen2_5_vl"}))
    short, long = (
        ours.video_layout(VideoHeader(Size(640, 360), frames, 25.0), VideoLayoutOptions()) for frames in (100, 2500)
    )
    assert short.size == long.size and short.written == long.written == "<|video_pad|>"
    assert (len(short.frames), len(long.frames)) == (8, 200)
    assert long.runs == (100 * long.grid.h * long.grid.w // 4,)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_honours_what_a_request_says_of_clips(family: str) -> None:
    ours, header = QwenProcessor.of(ProcessorFiles({"model_type": family})), VideoHeader(Size(1280, 720), 3000, 30.0)
    assert len(ours.video_layout(header, VideoLayoutOptions(fps=0.1)).frames) == 10
    assert len(ours.video_layout(header, VideoLayoutOptions(max_frames=16)).frames) == 16
    assert [len(ours.video_layout(header, VideoLayoutOptions(frames=frames)).frames) for frames in (2, 3, 6)] == [
        2,
        4,
        6,
    ]
    small = ours.video_layout(header, VideoLayoutOptions(frames=8, max_pixels=128 * 128))
    assert small.size.area <= 128 * 128
    total = ours.video_layout(header, VideoLayoutOptions(frames=8, min_pixels=1, total_pixels=8 * 100_000))
    assert total.size.area * 8 <= 8 * 100_000 * 2


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_shortest_clips_are_shown_whole_in_pairs(family: str, frames: int) -> None:
    layout = QwenProcessor.of(ProcessorFiles({"model_type": family})).video_layout(
        VideoHeader(Size(56, 56), frames, 30.0), VideoLayoutOptions()
    )
    assert len(layout.frames) % 2 == 0 and max(layout.frames) < frames
    assert layout.grid.t == len(layout.frames) // 2


def test_qwen_takes_fewer_pixels_where_a_request_asks_and_never_more_than_it_may() -> None:
    ours, size = QwenProcessor.of(ProcessorFiles({"model_type": "qwen2_vl"})), Size(3000, 2000)
    assert ours.image_layout(size, ImageLayoutOptions(max_pixels=100_000)).size.area <= 100_000
    assert ours.image_layout(size, ImageLayoutOptions("low")).size.area <= 512 * 512
    assert ours.image_layout(size, ImageLayoutOptions(max_pixels=10**8)) == ours.image_layout(size, ANY)
    grown = ours.image_layout(Size(30, 30), ImageLayoutOptions(min_pixels=500_000))
    assert 500_000 <= grown.size.area <= 28 * 28 * 1280


def test_pixtral_resizes_and_breaks_lines_as_its_processor_does() -> None:
    resize = transformers("pixtral", "image_processing_pil_pixtral", "get_resize_output_image_size")
    for patch, merge, longest in ((16, 1, 1024), (14, 2, 1540)):
        files = ProcessorFiles(
            {"model_type": "pixtral"},
            {"size": {"longest_edge": longest}},
            processor={"patch_size": patch, "spatial_merge_size": merge},
        )
        ours = PixtralProcessor.of(files)
        for size in sensible(sizes(60, 3000)):
            blank = np.zeros((size.height, size.width, 1))
            height, width = resize(blank, (longest, longest), (patch * merge,) * 2)
            layout = ours.image_layout(size, ANY)
            assert layout.size == (width, height)
            rows, columns = height // (patch * merge), width // (patch * merge)
            assert layout.runs == (columns,) * rows
            assert layout.written.count("[IMG_BREAK]") == rows - 1 and layout.written.endswith("[IMG_END]")


def test_idefics_cuts_tiles_as_its_processor_does() -> None:
    made = transformers("idefics3", "image_processing_pil_idefics3", "Idefics3ImageProcessorPil")
    for longest, tile in ((4 * 364, 364), (2048, 512), (512, 512)):
        pictures = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
        theirs, ours = made(**pictures), IdeficsProcessor.of(ProcessorFiles({}, pictures))
        for size in sensible(sizes(150, 5000)):
            tiles, rows, columns = theirs.get_number_of_image_patches(size.height, size.width, {})
            layout = ours.image_layout(size, ANY)
            assert layout.grid.t == max(tiles, 1) == len(layout.runs), size  # one alone is none to them
            assert layout.written.count("<row_") == rows * columns


def test_idefics_writes_tiles_as_its_processor_does() -> None:
    made = transformers("idefics3", "processing_idefics3", "Idefics3Processor")

    class Named:
        fake_image_token, image_token, global_image_tag = "<fake_token_around_image>", "<image>", "<global-img>"
        image_seq_len = 1

    ours = IdeficsProcessor.of(
        ProcessorFiles({}, {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}})
    )
    for size, rows, columns in ((Size(800, 600), 3, 4), (Size(600, 600), 4, 4)):
        told = made.replace_image_token(Named(), {"rows": [[rows]], "cols": [[columns]]}, 0)
        assert ours.image_layout(size, ANY).written == told
    single = made.replace_image_token(Named(), {"rows": [[0]], "cols": [[0]]}, 0)
    assert ours.image_layout(Size(800, 600), ImageLayoutOptions("low")).written == single


def test_internvl_arranges_tiles_as_its_processor_does() -> None:
    made = transformers("got_ocr2", "image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")
    theirs = made(size={"height": 448, "width": 448}, crop_to_patches=True)
    ours = InternVLProcessor.of(ProcessorFiles({}, {"size": {"height": 448, "width": 448}}))
    for size in sizes(300, 4000):
        tiles = theirs.get_number_of_image_patches(size.height, size.width, {})
        assert ours.image_layout(size, ANY).runs == (256 * tiles,), size


def test_llava_next_counts_features_as_its_processor_does() -> None:
    made = transformers("llava_next", "processing_llava_next", "LlavaNextProcessor")
    canvases = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

    class Named:
        patch_size, num_additional_image_tokens = 14, 1
        image_processor = type("Grid", (), {"image_grid_pinpoints": canvases})
        _get_unpadded_features = made._get_unpadded_features

    files = ProcessorFiles(
        {"model_type": "llava_next"}, {"image_grid_pinpoints": canvases, "crop_size": {"height": 336, "width": 336}}
    )
    ours = LlavaProcessor.of(files)
    for size in sizes(300, 3000):
        features = made._get_number_of_features(Named(), size.height, size.width, 336, 336) - 1
        assert ours.image_layout(size, ANY).runs == (features,), size


def test_llava_and_gemma_see_every_picture_in_one_size() -> None:
    llava, gemma = LlavaProcessor.of(ProcessorFiles({"model_type": "llava"})), GemmaProcessor.of(ProcessorFiles())
    for size in sizes(5, 3000):
        assert (llava.image_layout(size, ANY).runs, gemma.image_layout(size, ANY).runs) == ((576,), (256,))
    assert gemma.image_layout(Size(9, 9), ANY).written == "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"


def test_gemma_3n_embeds_the_token_behind_an_image_with_it() -> None:
    ours = GemmaProcessor.of_3n(ProcessorFiles({"model_type": "gemma3n"}, {"size": {"height": 768, "width": 768}}))
    layout = ours.image_layout(Size(300, 200), ANY)
    assert (layout.size, layout.grid, layout.runs) == ((768, 768), (1, 48, 48), (256 + 1,))
    assert layout.written == "\n\n<start_of_image><image_soft_token>\n\n"
    assert ours.placeholders["image"].sought == "<image_soft_token>"


def test_phi_3_arranges_tiles_as_its_processor_does() -> None:
    transform = upstream("mlx_vlm.models.phi3_v.processing_phi3_v", "_calc_hd_transform_size")
    ours = Phi3Processor.of(ProcessorFiles({}, {"num_crops": 16}))
    for size in sizes(300, 4000):
        assert ours.image_layout(size, ANY).size == transform(size.width, size.height, 16), size


def test_phi_3_counts_a_tile_and_the_whole_and_their_lines() -> None:
    layout = Phi3Processor.of(ProcessorFiles({}, {"num_crops": 16})).image_layout(Size(1344, 1344), ANY)
    assert layout.size == (1344, 1344) and layout.runs == ((16 + 1) * 144 + 1 + 5 * 12,)


def test_gemma_4_has_as_many_tokens_as_its_makers_count() -> None:
    theirs = upstream("transformers.models.gemma4.image_processing_pil_gemma4", "get_aspect_ratio_preserving_size")
    for tokens in (70, 280, 1120):
        ours = Gemma4Processor.of(ProcessorFiles({}, {"max_soft_tokens": tokens}))
        for size in sizes(100, 3000):
            height, width = theirs(size.height, size.width, 16, tokens * 9, 3)
            layout = ours.image_layout(size, ANY)
            assert layout.size == (width, height), size
            assert layout.runs == (width * height // 48**2,)


def test_phi_4_keeps_the_number_of_patches_that_an_image_has_within_its_limits() -> None:
    theirs = upstream("transformers.models.siglip2.image_processing_pil_siglip2", "get_image_size_for_max_num_patches")
    ours = Phi4Processor.of(ProcessorFiles({"min_num_patches": 256, "max_num_patches": 3600}))
    for size in sensible(sizes(100, 3000)):
        patches = min(max((size.width // 16) * (size.height // 16), 256), 3600)
        layout = ours.image_layout(size, ANY)
        assert layout.size == theirs(size.height, size.width, 16, patches)[::-1], size
        assert layout.runs == (layout.size.area // 16**2,) and layout.features <= 3600
    assert ours.image_layout(Size(3000, 2000), ImageLayoutOptions("low")).features <= 1024


def test_older_minicpms_slices_are_as_large_as_its_own_processor_makes_images() -> None:
    theirs = upstream("mlx_vlm.models.minicpmo.processing_minicpmo", "MiniCPMOImageProcessor")._find_best_resize
    ours = MiniCpmProcessor.of_resampled(ProcessorFiles({"query_num": 64}))
    for size in sensible(sizes(100, 3000)):
        layout = ours.image_layout(size, ANY)
        assert layout.size == theirs(tuple(size), 448, 14, allow_upscale=layout.apart is None), size
        assert set(layout.runs) == {64}
        if layout.apart is not None and layout.arranged is not None:
            each = tuple(max(round(side / count), 1) for side, count in zip(size, layout.arranged, strict=True))
            assert (layout.apart.w * 14, layout.apart.h * 14) == theirs(each, 448, 14, allow_upscale=True), size
            assert layout.apart.t == layout.arranged.area == layout.written.count("<slice><unk></slice>") <= 9
    placeholder = ours.placeholders["image"]
    assert (placeholder.sought, placeholder.whole) == ("(<image>./</image>)", "(<image>./</image>)\n")


def test_glms_sizes_are_those_of_its_makers() -> None:
    theirs = upstream("transformers.models.glm4v.image_processing_pil_glm4v", "smart_resize")
    ours = MergedPatchesProcessor.of_glm(ProcessorFiles())
    for size in sizes(300, 4000):
        if size.aspect > 100:
            continue
        height, width = theirs(2, size.height, size.width, max_pixels=28 * 28 * 15000)
        layout = ours.image_layout(size, ANY)
        assert layout.size == (width, height), size
        assert layout.runs == (width * height // 28**2,)


@pytest.mark.parametrize("tiles", [4, 16])
def test_llama_4_enlarges_least_and_pads_least(tiles: int) -> None:
    """The examples of its makers."""
    assert llama4_canvas(Size(300, 200), 224, tiles, False) == (2, 1)
    assert llama4_canvas(Size(224, 224), 224, tiles, False) == (1, 1)
    assert llama4_canvas(Size(100, 100), 224, tiles, True) == (2, 2) if tiles == 4 else (4, 4)
    layout = Llama4Processor.of(ProcessorFiles({}, {"size": 224, "max_patches": tiles})).image_layout(
        Size(300, 200), ANY
    )
    assert layout.size == (300, 200) and layout.grid.t == 3 and layout.runs == (64, 64, 64)


def test_a_picture_of_no_sensible_shape_is_refused() -> None:
    with pytest.raises(BadMedia, match="Crop it"):
        QwenProcessor.of(ProcessorFiles()).image_layout(Size(1000, 1), ANY)


EVERY: list[tuple[str, Callable[[ProcessorFiles], MediaProcessor]]] = sorted(PROCESSORS.items())


@pytest.mark.parametrize(("name", "of"), EVERY)
def test_every_family_says_what_it_writes_and_where_features_go(
    name: str, of: Callable[[ProcessorFiles], MediaProcessor]
) -> None:
    ours = of(ProcessorFiles({"model_type": name}))
    assert "image" in ours.placeholders and all(each.sought in each.whole for each in ours.placeholders.values())
    for size in (Size(300, 200), Size(90, 1800)):
        layout = ours.image_layout(size, ANY)
        assert layout.features > 0 and layout.grid.patches > 0
        assert ours.image_layout(size, ImageLayoutOptions("low")).features <= layout.features


@pytest.mark.parametrize(("name", "of"), EVERY)
def test_wishes_that_a_family_has_no_rule_for_are_refused_by_name(
    name: str, of: Callable[[ProcessorFiles], MediaProcessor]
) -> None:
    ours = of(ProcessorFiles({"model_type": name}))
    if not isinstance(ours, QwenProcessor | MergedPatchesProcessor):
        with pytest.raises(Unsupported, match="max_pixels"):
            ours.image_layout(Size(64, 64), ImageLayoutOptions(max_pixels=1000))
    if not isinstance(ours, QwenProcessor):
        with pytest.raises(Unsupported, match="as images"):
            ours.video_layout(VideoHeader(Size(64, 64), 8, 8.0), VideoLayoutOptions())


def test_a_checkpoints_own_files_decide(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    found = read_processor(tmp_path)
    assert isinstance(found, QwenProcessor) and found.images.most == 12845056
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"max_pixels": 50176}}))
    found = read_processor(tmp_path)
    assert isinstance(found, QwenProcessor) and found.images.most == 50176
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_processor(tmp_path) is None
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_processor(tmp_path)


def test_lfm2_cuts_large_images_alone_and_none_where_its_files_say_so() -> None:
    ours = LfmProcessor.of(ProcessorFiles())
    assert ours.image_layout(Size(500, 500), ANY).apart is None
    large = ours.image_layout(Size(2000, 1000), ANY)
    assert (large.grid, large.runs[:-1]) == ((8, 32, 32), (256,) * 8) and large.apart is not None
    assert large.written.startswith("<|image_start|><|img_row_1_col_1|><image><|img_row_1_col_2|>")
    whole = LfmProcessor.of(ProcessorFiles({}, {"do_image_splitting": False})).image_layout(Size(2000, 1000), ANY)
    assert whole.grid.t == 1 and whole.apart is None and whole.features <= 256


def test_every_family_with_a_tower_has_a_processor() -> None:
    assert VISION_FAMILIES.keys() == PROCESSORS.keys()


TEMPLATES = {
    "google-gemma-4-31B-it": "gemma4",
    "Kimi-K2-Instruct": "kimi_k25",
    "LFM2.5-8B-A1B": "lfm2_vl",
    "MiniMax-M3": "minimax_m3_vl",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_templates_write_for_an_image_is_what_processors_look_for(template: str) -> None:
    file = SHELF / "llama.cpp" / f"{template}.jinja"
    if not file.is_file():
        pytest.skip("the collection of chat templates is not here")
    ours = PROCESSORS[TEMPLATES[template]](ProcessorFiles({"model_type": TEMPLATES[template]}))
    assert ours.placeholders["image"].sought in file.read_text()

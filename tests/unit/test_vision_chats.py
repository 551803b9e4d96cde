"""Promise: a conversation with images gives the loss that transformers itself computes, on the answers alone."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.chat.chat_models import ChatFlags, load_chat_model, small_chat_model
from accelerate_recipes.common.tasks.chat.vision_batches import VisionEncoder, unpad
from accelerate_recipes.common.tasks.chat.vision_chats import _open, load_vision_chats, shapes, with_parts
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED, with_losses
from accelerate_recipes.common.tasks.reading.image_decoding import Opener
from recipes.vision_language import freeze_idle, freeze_named
from support.vision_models import FAMILIES, made, write

SIZES = ((20, 30), (40, 17), (16, 16), (33, 64))


def image(number: int) -> Image.Image:
    height, width = SIZES[number]
    draws = numpy.random.default_rng(number)
    return Image.fromarray(draws.integers(0, 255, (height, width, 3), dtype=numpy.uint8))


def turns(*texts: str, images: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """A conversation of questions and answers in turn, with so many images before each question."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        shown = images[number // 2] if number % 2 == 0 and number // 2 < len(images) else 0
        parts = [{"type": "image"}] * shown + [{"type": "text", "text": text}]
        found.append({"role": "user" if number % 2 == 0 else "assistant", "content": parts})
    return found


CHATS = [
    (turns("What is it?", "A stone.", "And now?", "Still a stone, älter.", images=(2,)), [image(0), image(1)]),
    (turns("And?", "Sand.", "Then?", "A tree.", "Sure?", "Yes", images=(1, 0, 1)), [image(2), image(3)]),
    (turns("No image?", "None."), []),
]


BATCHED = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": False}


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_that_of_transformers(family: str, chunk: int) -> None:
    model, processor = made(family)
    model.train()
    texts = [processor.apply_chat_template(messages, tokenize=False) for messages, _ in CHATS]
    given = processor(text=texts, images=[images for _, images in CHATS], **BATCHED)
    labels = torch.full_like(given["input_ids"], IGNORED)
    for row, tokens, (messages, _) in zip(labels, given["input_ids"].tolist(), CHATS):
        for message in messages[1::2]:
            answer = message["content"][0]["text"] + "<|end|>\n"
            found, begins = (processor.tokenizer(text)["input_ids"] for text in (answer, "<|assistant|>"))
            whole = begins + found
            at = next(at for at in range(len(tokens)) if tokens[at : at + len(whole)] == whole) + len(begins)
            row[at : at + len(found)] = torch.tensor(found)
    expected = model(**given, labels=labels).loss
    gradients = torch.autograd.grad(expected, [*model.parameters()], allow_unused=True)

    encoder = VisionEncoder(processor, model.config.image_token_id, 400)
    batch = encoder.collate([encoder.sample(*chat) for chat in CHATS])
    weight = batch.pop("weight")
    assert weight.sum() == (labels[:, 1:] != IGNORED).sum()
    means = with_losses(model, chunk=chunk, longest=400, sees=unpad)(**batch)
    found = (means * weight).sum() / weight.sum()
    assert abs(float((found / expected).detach()) - 1) < 1e-6
    again = torch.autograd.grad(found, [*model.parameters()], allow_unused=True)
    for one, other in zip(gradients, again):
        assert (one is None) == (other is None)
        if one is not None:
            assert float((one - other).norm()) <= 1e-5 * float(one.norm()) + 1e-9


def encoder_of(family: str, max_length: int = 400) -> VisionEncoder:
    model, processor = made(family)
    return VisionEncoder(processor, model.config.image_token_id, max_length)


def test_what_tensors_mean_is_measured() -> None:
    assert encoder_of("idefics3").of_sample == ["pixel_values", "pixel_attention_mask"]
    qwen = encoder_of("qwen2_vl")
    assert (qwen.of_tokens, qwen.of_rows) == (["mm_token_type_ids"], ["pixel_values", "image_grid_thw"])


def test_a_processor_that_pads_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = made("llava")
    whole = type(processor).__call__

    def other(self: Any, images: Any = None, **options: Any) -> Any:
        found = whole(self, images=images, **options)
        if images is not None and len(images) > 1:
            found["pixel_values"] = found["pixel_values"].flip(0)
        return found

    monkeypatch.setattr(type(processor), "__call__", other)
    with pytest.raises(UsageError, match="LlavaProcessor pads pixel_values in its own way"):
        VisionEncoder(processor, model.config.image_token_id, 400)


def load(folder: Path) -> Any:
    """The model and the processor in a folder, as the recipe loads them."""
    config = ChatFlags(model_name_or_path=str(folder), max_length=400)
    return load_chat_model(config, small_chat_model, AutoModelForImageTextToText)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_take_what_their_processors_make(tmp_path: Path, family: str) -> None:
    model, processor = load(write(family, tmp_path))
    assert type(model).__name__ == type(made(family)[0]).__name__ and hasattr(processor, "image_processor")


SQUARE = {"height": 9, "width": 9}


@pytest.mark.parametrize(
    ("file", "settings", "line"),
    [
        *(("config.json", {"image_token_index": number}, "image tokens do not match") for number in (65, 9999)),
        ("config.json", {"vision_feature_layer": -9}, "tuple index out of range"),
        ("processor_config.json", {"patch_size": 3}, "image tokens do not match"),
        (
            "processor_config.json",
            {"image_processor": {"crop_size": SQUARE}},
            r"Input image size \(9\*9\) doesn't match",
        ),
    ],
)
def test_a_model_and_a_processor_that_do_not_match_are_refused(
    tmp_path: Path, file: str, settings: dict[str, Any], line: str
) -> None:
    path = write("llava", tmp_path) / file
    content = json.loads(path.read_text())
    if "image_processor" in settings:
        settings = {"image_processor": content["image_processor"] | settings["image_processor"]}
    path.write_text(json.dumps(content | settings))
    with pytest.raises(UsageError, match=f"--model_name_or_path {tmp_path} cannot take the smallest input .*{line}"):
        load(tmp_path)


def test_tokens_are_cut_but_never_images() -> None:
    whole = encoder_of("gemma3").sample(*CHATS[0])
    length, shown = len(whole["tokens"]), int((whole["token_type_ids"] == 1).nonzero()[-1]) + 1
    cut = encoder_of("gemma3", length - 10).sample(*CHATS[0])
    assert cut["tokens"].equal(whole["tokens"][:-10]) and cut["labels"][:-1].equal(whole["labels"][:-11])
    assert cut["labels"][-1] == IGNORED and len(cut["token_type_ids"]) == length - 10
    with pytest.raises(UsageError, match=f"its images end at token {shown}: use --max_length {shown} or more"):
        encoder_of("gemma3", shown - 1).sample(*CHATS[0])


def test_answers_beyond_the_limit_are_named() -> None:
    """They would give a step without a trained token, which has no loss."""
    whole = encoder_of("gemma3").sample(*CHATS[0])
    first = int((whole["labels"] != IGNORED).nonzero()[0]) + 2  # the number of the first trained token
    shown = int((whole["token_type_ids"] == 1).nonzero()[-1]) + 1
    assert shown < first - 1
    with pytest.raises(UsageError, match=f"first answer begins at token {first}: use --max_length {first} or more"):
        encoder_of("gemma3", first - 1).sample(*CHATS[0])
    assert encoder_of("gemma3", first).sample(*CHATS[0])["weight"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_images_in_a_text_are_refused(family: str) -> None:
    encoder = encoder_of(family)
    assert encoder.processor.tokenizer.convert_ids_to_tokens(encoder.image_token) in encoder._marks
    for mark in encoder._marks:
        messages = turns(f"What is {mark}?", "A stone.", images=(1,))
        with pytest.raises(UsageError, match=re.escape(f"a text has {mark}, which the processor writes for an image")):
            encoder.sample(messages, [image(0)])


def test_columns_with_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    image(0).save(tmp_path / "a.png")
    row = {"messages": json.dumps(turns("Why?", "So.", images=(1,))), "images": '["a.png"]', "id": "1"}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    train, _ = load_vision_chats(str(tmp_path / "chats.jsonl"), "messages", "images")
    messages, images = train.read(0)
    assert messages == turns("Why?", "So.", images=(1,)) and images[0].size == image(0).size
    assert "columns not read: id" in capsys.readouterr().out


def test_conversations_without_an_answer_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """ShareGPT's form, as LLaVA's data have it."""
    asked = {"from": "human", "value": "<image>What?"}
    rows = [
        {"chat": [asked, {"from": "gpt", "value": "Red."}][: 1 + number % 2], "image": "0.png"} for number in range(9)
    ]
    Image.new("RGB", (20, 30), "red").save(tmp_path / "0.png")
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, evaluation = load_vision_chats(str(tmp_path / "chats.jsonl"), "chat", "image")
    assert sorted([*train.rows, *evaluation.rows]) == [1, 3, 5, 7]
    assert "5 of 9 conversations have no answer: left out" in capsys.readouterr().out
    messages, images = train.read(0)
    assert messages == turns("What?", "Red.", images=(1,)) and images[0].size == (20, 30)


def test_answers_of_weight_0_are_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    chats = [[*turns("Why?", "So.")] for _ in range(4)]
    chats[2][1]["weight"] = 0
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    train, evaluation = load_vision_chats(str(file), "messages", "images")
    assert sorted([*train.rows, *evaluation.rows]) == [0, 1, 3]
    assert "1 of 4 conversations have no answer: left out" in capsys.readouterr().out
    file.write_text(json.dumps({"messages": chats[2]}) + "\n" + json.dumps({"messages": chats[2]}))
    with pytest.raises(UsageError, match="no message has the role assistant and a weight above 0: nothing to learn"):
        load_vision_chats(str(file), "messages", "images")


def test_an_image_in_an_answer_is_refused() -> None:
    messages = turns("Draw", "a", images=(0,))
    messages[1]["content"].append(IMAGE)
    with pytest.raises(UsageError, match="an answer has an image"):
        encoder_of("llava").sample(messages, [image(0)])


IMAGE, WHY = {"type": "image"}, {"type": "text", "text": "Why?"}


@pytest.mark.parametrize(
    ("content", "given", "expected", "order"),
    [
        ("Why?", ["a"], [IMAGE, WHY], ["a"]),
        ("Why?", [], [WHY], []),
        ("<image>Why?<image>", ["a", "b"], [IMAGE, WHY, IMAGE], ["a", "b"]),
        ([{**IMAGE, "text": None}, WHY], ["a"], [IMAGE, WHY], ["a"]),
        ([WHY, {**IMAGE, "path": "b"}, IMAGE], ["a"], [WHY, IMAGE, IMAGE], ["b", "a"]),
        ([{**IMAGE, "index": 1}, {**IMAGE, "index": 0}], ["a", "b"], [IMAGE, IMAGE], ["b", "a"]),
        (
            [IMAGE, {"type": "text", "text": "Is <image> HTML?"}],
            ["a"],
            [IMAGE, {"type": "text", "text": "Is <image> HTML?"}],
            ["a"],
        ),
        ([{**IMAGE, "index": 1.0}], ["a", "b"], [IMAGE], ["b"]),  # as a table has whole numbers beside missing ones
        (None, [], [], []),
    ],
)
def test_places_of_images(content: Any, given: list[str], expected: list[Any], order: list[str]) -> None:
    messages, images = with_parts([{"role": "user", "content": content}], given)
    assert (messages, images) == ([{"role": "user", "content": expected}], order)


@pytest.mark.parametrize(
    ("content", "given", "line"),
    [
        (
            "<image><image>",
            ["a"],
            "its messages have 2 places for images, but its column has 1 images: expected the same number",
        ),
        ("<image>", ["a", "b"], "its messages have 1 places for images, but its column has 2 images"),
        ([{**IMAGE, "path": "a"}], ["b"], "its messages have 0 places for images, but its column has 1 images"),
        ("<image>", [None], "none of them empty"),
        ([{**IMAGE, "index": 2}], ["a"], "an image has the index 2, but its row has 1 images"),
        ([{**IMAGE, "index": "0"}], ["a"], "an image has the index '0', but its row has 1 images"),
        ([{**IMAGE, "index": -1}], ["a"], "an image has the index -1, but its row has 1 images"),
        ({"type": "sound", "text": "a"}, [], "a part of a message is {'type': 'sound', 'text': 'a'}: expected"),
        ([{"type": "text", "text": "What?", "image": "a.png"}], [], "a part of a message is {'type': 'text', 'text'"),
        (5, [], "a part of a message is 5: expected"),
        ([{**IMAGE, "base64": "aGVsbG8="}], [], 'an image has base64: expected {"type": "image", "path": "a file"}'),
        ([{"type": "sound"}], [], "a part of a message is {'type': 'sound'}: expected"),
        ([None], [], "a part of a message is None: expected"),
    ],
)
def test_messages_that_cannot_be_used(content: Any, given: list[Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        with_parts([{"role": "user", "content": content}], given)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ({"content": None}, "message 2 (assistant) has no content"),
        ({"content": "Red.", "weight": 0.5}, "message 2 (assistant) has the weight 0.5: expected 1 (trained) or 0"),
    ],
)
def test_answers_that_cannot_be_used(answer: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        with_parts([{"role": "user", "content": "Why?"}, {"role": "assistant"} | answer], [])


@pytest.mark.parametrize("messages", [5, [], "Why?"])
def test_what_is_no_list_of_messages(messages: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of messages"):
        with_parts(messages, ["a"])


@pytest.mark.parametrize(
    "image",
    ["lost.png", "__init__.py", "~nobody/x.png", {"bytes": "text"}, {"bytes": b"nonsense"}, {"path": None}, 5],
)
def test_images_that_cannot_be_read(image: Any) -> None:
    with pytest.raises(UsageError, match=r"cannot be read \("):
        _open(image, Path(__file__).parents[1] / "support", Opener())


@pytest.mark.parametrize(
    ("image", "what"),
    [("data:image/png;base64,iVBORw0KGgo=", "base64"), ("iVBORw0KGgo/" * 99, "base64"), ("https://a.b/c.png", "a web")],
)
def test_images_that_are_no_path(tmp_path: Path, image: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"an image is {what}.*: expected the path of a file") as raised:
        _open(image, tmp_path, Opener())
    assert len(str(raised.value)) < 120


def test_images_without_a_place_come_before_the_first_question() -> None:
    chat = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    messages, images = with_parts([{**one, "tool_calls": None, "name": "b"} for one in chat], ["one"])
    assert [len(message["content"]) for message in messages] == [1, 2, 1] and images == ["one"]
    assert messages[1]["content"][0] == IMAGE and messages[0].keys() == {"role", "content", "name"}


def test_images_are_what_a_viewer_shows(tmp_path: Path) -> None:
    Image.fromarray(numpy.full((4, 4), 45000, numpy.uint16)).save(tmp_path / "deep.png")
    Image.new("RGBA", (4, 4)).save(tmp_path / "clear.png")
    for name, level in (("deep", 175), ("clear", 255)):
        path = tmp_path / f"{name}.png"
        for image in (path.name, str(path), {"bytes": path.read_bytes()}, {"path": str(path)}, Image.open(path)):
            found = _open(image, tmp_path, Opener())
            assert (found.mode, found.getpixel((0, 0))) == ("RGB", (level,) * 3)


@pytest.mark.parametrize("begins", [True, False])
def test_special_tokens_come_as_from_the_template_of_transformers(begins: bool) -> None:
    """A processor adds the token of the beginning if its template does not."""
    from tokenizers.processors import TemplateProcessing

    model, processor = made("llava")
    tokenizer = processor.tokenizer
    mark = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [mark])
    if not begins:
        processor.chat_template = processor.chat_template.replace("{{ bos_token }}", "")
    messages, images = CHATS[0]
    left = iter(images)
    shown = [one | {"content": [{"type": "image", "image": next(left)} if part == IMAGE else part
                                for part in one["content"]]} for one in messages]  # fmt: skip
    expected = processor.apply_chat_template(shown, tokenize=True, return_dict=True, return_tensors="pt")["input_ids"]
    sample = VisionEncoder(processor, model.config.image_token_id, 400).sample(messages, images)
    assert sample["tokens"].equal(expected[0]) and sample["tokens"][:2].tolist().count(mark[1]) == 1
    trained = processor.tokenizer.decode(sample["labels"][sample["labels"] != IGNORED])
    assert trained == "A stone.<|end|>\nStill a stone, älter.<|end|>\n"


@pytest.mark.parametrize("column", ["bytes", "path", "image"])
def test_parquet_files_and_columns_of_images(tmp_path: Path, column: str) -> None:
    import datasets

    sizes = [(20, 30), (40, 17), (8, 8)]
    for number, size in enumerate(sizes):
        Image.new("RGBA", size, "red").save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    rows = {"chat": [turns("What?", "Red.")] * 3, "photos": [[path] for path in paths]}
    features = None
    if column != "path":
        part = {"type": datasets.Value("string"), "text": datasets.Value("string")}
        messages = datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)})
        features = datasets.Features({"chat": messages, "photos": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict(rows, features=features)
    if column == "bytes":
        table = table.cast_column("photos", datasets.List(datasets.Image(decode=False)))
    table.to_parquet(tmp_path / "chats.parquet")
    parts = load_vision_chats(str(tmp_path / "chats.parquet"), "chat", "photos")
    read = [part.read(index) for part in parts for index in range(len(part))]
    assert sorted(images[0].size for _, images in read) == sorted(sizes)
    assert all(images[0].mode == "RGB" for _, images in read)
    assert [part["type"] for part in read[0][0][0]["content"]] == ["image", "text"]


def test_embedded_conversations() -> None:
    chats = shapes(100)
    assert chats[0][0] == shapes(100)[0][0]
    assert {len(images) for _, images in chats} == {0, 1, 2}
    assert len({image.size for _, images in chats for image in images}) > 20


def test_frozen_weights() -> None:
    model, _ = made("idefics3")
    freeze_idle(model)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == [f"model.vision_model.encoder.layers.{layer}.self_attn.k_proj.bias" for layer in (0, 1)]
    freeze_named(model, "vision_model,connector")
    trained = {name.split(".")[1] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {"text_model"}
    model, _ = made("llava")  # its features come from the last layer but one
    freeze_idle(model)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    frozen = [name for name in frozen if not name.endswith("k_proj.bias")]
    assert frozen and all("encoder.layers.2." in name or ".post_layernorm." in name for name in frozen)
    assert not any("encoder.layers.2." in name for name, weight in model.named_parameters() if weight.requires_grad)
    model, _ = made("qwen2_vl")
    freeze_idle(model)
    assert all(weight.requires_grad for weight in model.parameters())
    with pytest.raises(UsageError, match="no weight has vision_model in its name; use a part of model"):
        freeze_named(model, "lm_head, vision_model")

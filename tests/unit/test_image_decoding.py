"""Promise: an image means what a viewer shows, in every mode, depth and form of transparency."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.reading.image_decoding import Opener
from accelerate_recipes.common.tasks.reading.text_files import local_path


def png(rows: numpy.ndarray, depth: int, colour_type: int, key: bytes = b"") -> bytes:
    """A PNG whose rows of bytes, key for transparent, depth and type stand here, not in Pillow."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    header = struct.pack(">IIBBBBB", rows.shape[1] * 8 // depth // samples, len(rows), depth, colour_type, 0, 0, 0)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = [(b"IHDR", header)] + [(b"tRNS", key)] * bool(key) + [(b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def flat(mode: str, value: Any) -> Image.Image:
    return Image.new(mode, (4, 4), value)


def deep(value: int, kind: str) -> Image.Image:
    return Image.fromarray(numpy.full((4, 4), value, kind))


def with_palette(alpha: int | bytes | None = None) -> Image.Image:
    image = flat("P", 2)
    image.putpalette([9, 9, 9, 8, 8, 8, 100, 150, 200])
    image.info |= {} if alpha is None else {"transparency": alpha}
    return image


def tiff(image: Image.Image, **tags: int) -> bytes:
    return saved(image, "TIFF", tiffinfo={258: tags.get("bits", 16), 262: tags.get("photometric", 1)})


def pixels(file: Any) -> list[int]:
    image = Opener()(file, "x.png")
    assert image.mode in ("L", "RGB")
    return [int(value) for value in numpy.asarray(image).reshape(-1, len(image.getbands()))[-1]]


HALF_RED = [255, 255 - 128, 255 - 128]  # (255, 0, 0) with alpha 128/255 on white
MODES = {
    "1": (flat("1", 1), [255]),
    "L": (flat("L", 77), [77]),
    "LA": (flat("LA", (0, 128)), [127]),
    "La": (flat("LA", (40, 128)).convert("La"), [round(40 * 128 / 255) + 127]),
    "P": (with_palette(), [100, 150, 200]),
    "P in a file": (saved(with_palette(), "GIF"), [100, 150, 200]),
    "PA": (with_palette().convert("PA"), [100, 150, 200]),
    "RGB": (flat("RGB", (1, 2, 3)), [1, 2, 3]),
    "RGBX": (flat("RGBX", (1, 2, 3, 4)), [1, 2, 3]),
    "RGBA": (flat("RGBA", (255, 0, 0, 128)), HALF_RED),
    "RGBa": (flat("RGBa", (128, 0, 0, 128)), HALF_RED),
    "LAB in TIFF": (saved(flat("LAB", (138, 209, 198)), "TIFF"), [255, 0, 0]),
    "CMYK": (flat("CMYK", (255, 0, 51, 0)), [0, 255, 204]),
    "CMYK in TIFF": (saved(flat("CMYK", (255, 0, 51, 0)), "TIFF"), [0, 255, 204]),
    "CMYK in JPEG": (saved(flat("CMYK", (0, 0, 0, 153)), "JPEG", quality=100), [102, 102, 102]),
    "YCbCr": (flat("YCbCr", (149, 43, 21)), [0, 255, 0]),  # JFIF's formula: green
    "HSV": (flat("HSV", (0, 255, 200)), [200, 0, 0]),
    "LAB": (flat("LAB", (138, 209, 198)), [255, 0, 0]),  # sRGB's red under D50: L 54.3, a 80.8, b 69.9
    "LAB, grey": (flat("LAB", (128, 128, 128)), [119] * 3),  # L 50.2: Y 0.186, 255 * (1.055 * Y ** (1 / 2.4) - 0.055)
    "I;16": (deep(10000, "<u2"), [round(10000 / 257)]),
    "I;16B": (Image.frombytes("I;16B", (4, 4), struct.pack(">H", 45000) * 16), [round(45000 / 257)]),
    "I;16L": (Image.frombytes("I;16L", (4, 4), struct.pack("<H", 45000) * 16), [round(45000 / 257)]),
    "I;16N": (Image.frombytes("I;16N", (4, 4), struct.pack("=H", 45000) * 16), [round(45000 / 257)]),
    "I": (flat("I", 10000), [round(10000 / 257)]),
    "F": (flat("F", 0.25), [64]),
    "16 bits in PNG": (saved(deep(65406, "<u2"), "PNG"), [254]),  # 254.498
    "16 bits in PNG, up": (saved(deep(65407, "<u2"), "PNG"), [255]),  # 254.502
    "16 bits in TIFF": (saved(deep(45000, "<u2"), "TIFF"), [175]),
    "16 bits in TIFF, big-endian": (saved(Image.frombytes("I;16B", (4, 4), b"\xaf\xc8" * 16), "TIFF"), [175]),
    "16 bits in PGM": (b"P5 4 4 65535\n" + struct.pack(">H", 45000) * 16, [175]),
    "10 bits in PGM": (b"P5 4 4 1023\n" + struct.pack(">H", 512) * 16, [128]),
    "16 bits in TIFF, zero is white": (tiff(deep(45000, "<u2"), photometric=0), [80]),
    "16 bits a colour in PNG": (png(numpy.full((4, 12), 45000, ">u2").view("u1"), 16, 2), [175] * 3),
    "16 bits and alpha in PNG": (png(numpy.tile([45000, 65535], (4, 4)).astype(">u2").view("u1"), 16, 4), [175]),
    "palette of greys": (flat("L", 77).convert("P"), [77]),
    "palette entry that is transparent": (with_palette(2), [255]),
    "palette with alpha": (with_palette(b"\xff\xff\x80"), [255 - 78, 255 - 53, 255 - 28]),
    "GIF with a transparent entry": (saved(with_palette(2), "GIF", transparency=2), [255]),
    "key of 1 bit": (png(numpy.full((4, 1), 0, "u1"), 1, 0, b"\0\0"), [255]),
    "other key of 1 bit": (png(numpy.full((4, 1), 0, "u1"), 1, 0, b"\0\1"), [0]),
    "key of 2 bits": (png(numpy.full((4, 1), 0b01010101, "u1"), 2, 0, b"\0\1"), [255]),
    "other key of 2 bits": (png(numpy.full((4, 1), 0b01010101, "u1"), 2, 0, b"\0\2"), [85]),
    "key of 4 bits": (png(numpy.full((4, 2), 0x77, "u1"), 4, 0, b"\0\7"), [255]),
    "key of 8 bits": (png(numpy.full((4, 4), 7, "u1"), 8, 0, b"\0\7"), [255]),
    "key of 16 bits": (png(numpy.full((4, 4), 1000, ">u2").view("u1"), 16, 0, struct.pack(">H", 1000)), [255]),
    "other key of 16 bits": (png(numpy.full((4, 4), 1000, ">u2").view("u1"), 16, 0, struct.pack(">H", 1001)), [4]),
    "key of a colour": (png(numpy.full((4, 12), 7, "u1"), 8, 2, b"\0\7\0\7\0\7"), [255] * 3),
    "key of a deep colour": (png(numpy.full((4, 12), 9000, ">u2").view("u1"), 16, 2, b"\x23\x28" * 3), [255] * 3),
    "alpha in WebP": (saved(flat("RGBA", (255, 0, 0, 0)), "WEBP", lossless=True), [255] * 3),
}


@pytest.mark.parametrize("mode", MODES)
def test_brightness(mode: str, tmp_path: Path) -> None:
    image, expected = MODES[mode]
    rounded = {
        "LAB": 6,
        "LAB in TIFF": 6,
        "LAB, grey": 1,
        "YCbCr": 2,
        "La": 1,
        "RGBa": 1,
        "CMYK in JPEG": 2,
    }  # steps of 8 bits, by the mode
    assert pixels(image) == pytest.approx(expected, abs=rounded.get(mode, 0))
    if isinstance(image, bytes):
        (tmp_path / "x").write_bytes(image)
        assert pixels(str(tmp_path / "x")) == pixels({"bytes": image, "path": None}) == pixels(image)
        assert pixels({"bytes": None, "path": str(tmp_path / "x")}) == pixels(image)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "16 bits", "compressed"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int, kind: str) -> None:
    """The tag says where row 0 and column 0 of the stored pixels belong (EXIF 2.3, page 30)."""
    upright = numpy.zeros((16, 24), numpy.uint8)
    upright[:8, :8], upright[:8, 16:] = 250, 120
    flips = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}[orientation]
    stored = upright[:: -1 if flips[0] else 1, :: -1 if flips[1] else 1]
    stored = stored.T if orientation > 4 else stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(stored.astype("<u2") * 257 if kind == "16 bits" else numpy.ascontiguousarray(stored))
    options = {"compression": "tiff_lzw"} if kind == "compressed" else {"lossless": True} if kind == "WEBP" else {}
    options = options | ({"quality": 100} if kind == "JPEG" else {})
    file = saved(image, {"16 bits": "PNG", "compressed": "TIFF"}.get(kind, kind), exif=exif, **options)
    seen = numpy.asarray(Opener()(file, "x").convert("L")).astype(int)
    assert seen.shape == upright.shape and numpy.abs(seen - upright).max() < 12


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_of_several_frames_is_said_once(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(flat("RGB", (255, 0, 0)), kind, save_all=True, append_images=[flat("RGB", (0, 0, 255))])
    opener = Opener()
    for _ in range(2):
        red, _, blue = opener(file, "a.gif").convert("RGB").getpixel((3, 3))
        assert red > 240 and blue < 15
    assert capsys.readouterr().out == "a.gif has several frames: the run uses the first one\n"
    opener(saved(flat("RGB", (255, 0, 0)), kind), "b")
    assert not capsys.readouterr().out


def test_numbers_whose_white_is_not_defined(capsys: pytest.CaptureFixture[str]) -> None:
    opener = Opener()
    for file in (saved(flat("I", 10000), "TIFF"), saved(flat("I", 20000), "TIFF")):
        opener(file, "a.tif")
    assert capsys.readouterr().out == "a.tif has numbers of 32 bits: 0 counts as black and 65535 as white\n"
    Opener()(saved(flat("F", 0.5), "TIFF"), "b.tif")
    assert "b.tif has numbers of 32 bits: 0 counts as black and 1 as white" in capsys.readouterr().out
    for image in (flat("I", 70000), flat("I", -1), flat("F", 1.5), flat("F", float("nan"))):
        with pytest.raises(UsageError, match=r"c\.tif has numbers from .*: convert it to 8 or 16 bits"):
            Opener()(saved(image, "TIFF"), "c.tif")
    for image in (
        saved(deep(9, "<u2"), "PNG"),
        deep(9, "<u2"),
        MODES["16 bits in PGM"][0],
        MODES["10 bits in PGM"][0],
    ):
        Opener()(image, "d.png")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"GIF8 and no more", "not an image that Pillow knows: expected a file such as PNG or JPEG"),
        (saved(flat("RGB", 0), "PNG")[:-30], "cannot be read ("),
        (saved(Image.effect_noise((64, 64), 50), "JPEG")[:500], "truncated"),
        (saved(Image.effect_noise((64, 64), 50), "TIFF")[:500], "cannot be read ("),
        (
            png(numpy.zeros((1, 1), "u1"), 8, 0).replace(b"\0\0\0\1\0\0\0\1\10", b"\0\2\0\0\0\2\0\0\10"),
            "cannot be read (",
        ),
        (None, "No such file or directory"),
    ],
    ids=["empty", "no image", "png", "jpeg", "tiff", "size of the header", "missing"],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "broken.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Opener()(str(path), str(path))
    assert str(caught.value).startswith(f"{path} cannot be read (") and reason in str(caught.value)
    assert "\n" not in str(caught.value) and "object at" not in str(caught.value)


def test_more_pixels_than_are_safe() -> None:
    header = struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    bomb = png(numpy.zeros((1, 1), "u1"), 1, 0)
    bomb = bomb[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + bomb[33:]
    with pytest.raises(UsageError, match=r"x cannot be read \(more than 178,956,970 pixels: make it smaller\)"):
        Opener()(bomb, "x")


def test_rows_without_an_image() -> None:
    for file in ({"bytes": None, "path": None}, None):
        with pytest.raises(UsageError, match=r"row 3 cannot be read \(it is missing\)"):
            Opener()(file, "row 3")


def test_the_path_that_is_typed_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert local_path("~/a") == tmp_path / "home" / "a" and local_path("~no-such-user/a") == Path("~no-such-user/a")
    (tmp_path / "~").mkdir()
    assert local_path("~") == Path("~")

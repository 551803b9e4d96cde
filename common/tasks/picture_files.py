"""Pictures as files hold them."""

from PIL import Image, ImageOps


def on_white(picture: Image.Image) -> Image.Image:
    """A picture in RGB, upright, white where it is transparent. Raises what Pillow raises for a broken one."""
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits; `convert` would cut them off at 255
        picture = picture.convert("I").point(lambda value: value / 256).convert("L")
    if picture.has_transparency_data:
        paper = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(paper, picture.convert("RGBA"))
    return picture.convert("RGB")
